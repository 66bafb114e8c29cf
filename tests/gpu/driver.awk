# The source of a CUDA driver that accepts every library and kernel, and knows no device: `nm -D --defined-only STUB | awk -f driver.awk`, for
# the stub of a toolkit. cuDNN makes plans with it (plans.cu).
BEGIN {
    print "#define _GNU_SOURCE\n#include <dlfcn.h>"
    print "int hapt_accepts_anything(void) { return 1; }"
    print "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"
    print "int cuDeviceGetCount(int *count) { *count = 0; return 34; }"
    print "static int find(const char *name, void **to) { *to = dlsym(RTLD_DEFAULT, name); return *to ? 0 : 500; }"
    print "int cuGetProcAddress(const char *name, void **to, int v, unsigned long f) { return find(name, to); }"
    print "int cuGetProcAddress_v2(const char *name, void **to, int v, unsigned long f, int *s) { if (s) *s = 0; return find(name, to); }"
}
{ name = $3; sub(/@.*/, "", name) }
name !~ /^cu[A-Z]/ || name ~ /^cu(DriverGetVersion|DeviceGetCount|GetProcAddress(_v2)?)$/ || seen[name]++ { next }
{ printf "int %s(void) { return %d; }\n", name, name ~ /^cu(Library|Module|Kernel|Func)/ ? 0 : 34 }
