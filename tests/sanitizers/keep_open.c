/* Preloaded with the leak sanitizer: keeps libraries loaded, so that their frames have names when the process ends. */
int dlclose(void *handle);
int dlclose(void *handle)
{
    (void)handle;
    return 0;
}
