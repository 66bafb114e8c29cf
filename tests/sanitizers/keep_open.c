/* Preloaded under the leak sanitizer: libraries stay loaded, so that their frames have names at the end of the process.
 */
int dlclose(void *handle);
int dlclose(void *handle)
{
    (void)handle;
    return 0;
}
