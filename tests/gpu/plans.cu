/*
 * The plug-in's plans on the real cuDNN, without a GPU. From 9.8 on cuDNN ranks engines and makes plans for a described
 * device. Every convolution and every attention of usual models must get a plan within the workspace that the plug-in
 * requests; a T4 has none for attention. The description is not documented. Kernels of attention are compiled and given
 * to the driver: LD_LIBRARY_PATH names one that accepts anything (tests/gpu/driver.awk). Exit code 77: no such library,
 * or another form of description.
 */
#include "../../src/device/cuda/convolution.cu"
#include "../../src/device/cuda/cudnn.cu"
#include "../../src/device/cuda/cudnn_attention.cu"
#include "../../src/device/cuda/cudnn_convolution.cu"

static void *open_library(const char *soname, const char **error)
{
    void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    *error = library ? NULL : dlerror();
    return library;
}
static const struct cuda_host host = {NULL, open_library, 0};
const struct cuda_host *cuda_host = &host;
static cudnnBackendDescriptor_t device;
static decltype(cudnn.BackendSetAttribute) set_attribute;

/* Replacements for functions that need a GPU. */
size_t product_workspace(int64_t)
{
    return 0;
}
bool product_tf32(void)
{
    return false;
}
enum hapt_status product_run(const struct product *, void *, size_t, struct hapt_queue *)
{
    return HAPT_ERR_INTERNAL;
}
enum hapt_status cuda_check(cudaError_t, const char *)
{
    return HAPT_ERR_INTERNAL;
}

/* The device description replaces a handle, which needs a GPU. */
static cudnnStatus_t set_for_device(cudnnBackendDescriptor_t to, cudnnBackendAttributeName_t name,
                                    cudnnBackendAttributeType_t type, int64_t count, const void *value)
{
    if (name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) return CUDNN_STATUS_SUCCESS;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE)
        return set_attribute(to, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    if (name == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)
        set_attribute(to, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    return set_attribute(to, name, type, count, value);
}

static bool describe_device(const char *name, int capability, int processors, int shared_bytes, int cache_bytes)
{
    static const char form[] =
        "{\"deviceName\":\"%s\",\"deviceVer\":%d,\"multiProcessorCount\":%d,\"maxSharedMemoryPerBlockOptin\":%d,"
        "\"l2CacheSize\":%d,"
        "\"driverVer\":13000,\"cudaDeviceId\":0,\"pciDeviceId\":0,\"maxGridSize\":[2147483647,65535,65535],"
        "\"maxBlockSize\":[1024,1024,64],"
        "\"regsPerBlock\":65536,\"maxRegistersPerSM\":65536,\"smClockRateKHz\":1500000,\"memClockRateKHz\":1500000,"
        "\"warpSize\":32,"
        "\"maxSharedMemoryPerBlock\":49152,\"reservedSharedMemoryPerBlock\":1024,\"maxCtasPerSM\":32,"
        "\"maxThreadsPerBlock\":1024,"
        "\"maxThreadsPerSM\":2048,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":42949672960}";
    char text[1024];
    const int length = snprintf(text, sizeof text, form, name, capability, processors, shared_bytes, cache_bytes);
    return cudnn.BackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &device) == CUDNN_STATUS_SUCCESS &&
           set_attribute(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, length + 1, text) ==
               CUDNN_STATUS_SUCCESS &&
           cudnn.BackendFinalize(device) == CUDNN_STATUS_SUCCESS;
}

struct layer {
    int64_t rows, in, size, out, kernel, stride, padding;
};

static bool has_plan(const struct layer &of, enum convolution_result result, enum hapt_dtype dtype, bool accumulate)
{
    const int64_t places = (of.size + 2 * of.padding - of.kernel) / of.stride + 1;
    const enum hapt_dtype filter = result == RESULT_DW ? HAPT_F32 : dtype;
    struct hapt_view x = {NULL, dtype, 4, {of.rows, of.in, of.size, of.size}},
                     y = {NULL, dtype, 4, {of.rows, of.out, places, places}};
    struct hapt_view w = {NULL, filter, 4, {of.out, of.in, of.kernel, of.kernel}};
    if (result != RESULT_DW) x.shape[0] = y.shape[0] = rows_at_once(&x, &w, &y);
    const struct cudnn_convolution what = {result,    &x,         &w,         &y,
                                           of.stride, of.padding, accumulate, cudnn_workspace(&x, &w, &y, x.shape[0])};
    const struct convolution_key key = convolution_key_of(&what);
    const struct cudnn_problem problem = convolution_problem(&key);
    return plan_of(&problem) != NULL;
}

static int check_convolutions(int *checks)
{
    static const struct layer layers[] = {
        {32, 3, 224, 64, 7, 2, 3},   {32, 64, 56, 64, 3, 1, 1},   {32, 64, 56, 256, 1, 1, 0},
        {32, 256, 56, 512, 1, 2, 0}, {32, 128, 56, 128, 3, 2, 1}, {32, 512, 7, 512, 3, 1, 1},
        {16, 3, 224, 64, 3, 1, 1},   {16, 64, 224, 64, 3, 1, 1},  {8, 3, 32, 16, 3, 1, 1},
        {2, 17, 5, 16, 3, 2, 1},     {1, 1, 1, 1, 1, 1, 0}};
    static const enum hapt_dtype dtypes[] = {HAPT_F32, HAPT_BF16, HAPT_F16};
    int failures = 0;
    for (const struct layer &of : layers)
        for (int c = 0; c < 18; c++) {
            const enum hapt_dtype dtype = dtypes[c % 3];
            const enum convolution_result result = (enum convolution_result)(c / 3 % 3);
            if (result == RESULT_DW && dtype != HAPT_F32)
                continue; /* cuDNN has no such engine: it sums filters in the type of the operands */
            ++*checks;
            if (has_plan(of, result, dtype, c / 9)) continue;
            failures++;
            printf("no plan: %lld channels of %lld x %lld, result %d, type %d, accumulate %d\n", (long long)of.in,
                   (long long)of.size, (long long)of.size, result, dtype, c / 9);
        }
    return failures;
}

/* One share of the attention of GPT-2, long sequences, odd lengths, grouped heads, ViT, one position more than a tile;
 * not `whole`: in bf16, of GPT-2 and one other. */
static int check_attention(const char *name, bool expected, bool whole, int *checks)
{
    /* sequences, queries, heads, heads of keys, columns, keys (0: as many, under a mask or not) */
    static const int64_t shapes[][6] = {{16, 1024, 12, 12, 64, 0}, {2, 4096, 10, 10, 64, 77}, {1, 2048, 32, 8, 128, 0},
                                        {2, 1000, 8, 8, 96, 0},    {4, 4096, 12, 12, 128, 0}, {16, 197, 12, 12, 64, 0},
                                        {2, 129, 4, 2, 64, 0},     {4, 100, 8, 2, 64, 1000}};
    int failures = 0;
    for (int i = 0; i < (whole ? 8 : 3); i++)
        for (int c = 0; c < 8; c++) {
            const int64_t *shape = shapes[i];
            if (shape[5] && c & 4) continue; /* no mask */
            if (!whole && (c & 2 || (c & 4) == 4 * (i / 2))) continue;
            const bool backward = c & 1, packed = shape[2] == shape[3] && shape[5] == 0;
            const enum hapt_dtype dtype = c & 2 ? HAPT_F16 : HAPT_BF16;
            struct attention at = {};
            at.batch = shape[0];
            at.length = shape[1];
            at.keys = shape[5] ? shape[5] : at.length;
            at.heads = shape[2];
            at.kv_heads = shape[3];
            at.head = shape[4];
            at.out_width = at.heads * at.head;
            at.q_width = (packed ? 3 : 1) * at.out_width;
            at.kv_width = packed ? at.q_width : at.kv_heads * at.head;
            at.causal = c & 4;
            const struct attention_share share = share_of(&at, backward);
            const struct attention_key key = key_of_share(&at, dtype, backward, share);
            const struct cudnn_problem problem = attention_problem(&key);
            ++*checks;
            if ((plan_of(&problem) != NULL) == expected) continue;
            failures++;
            printf("%s: %s plan: attention of %lld x %lld, %lld heads of %lld, type %d, %s\n", name,
                   expected ? "no" : "a", (long long)at.batch, (long long)at.length, (long long)at.heads,
                   (long long)at.head, dtype, backward ? "backward" : "forward");
        }
    return failures;
}

/* The graphs have no window and no cap: such calls are left to hapt's kernels. The scale is an operand. */
static int check_limits(int *checks)
{
    int failures = 0;
    for (int c = 0; c < 8; c++) {
        const bool backward = c & 1;
        struct attention at = {};
        at.batch = 2;
        at.length = at.keys = 256;
        at.heads = at.kv_heads = 4;
        at.head = 64;
        at.q_width = at.kv_width = at.out_width = 256;
        at.causal = true;
        at.scale = 0.3f;
        at.window = c & 2 ? 100 : 0;
        at.cap = c & 4 ? 50 : 0;
        ++*checks;
        if (is_possible(&at, HAPT_BF16, backward) == (c < 2)) continue;
        failures++;
        printf("attention: window %lld, cap %g: %s by cuDNN\n", (long long)at.window, at.cap, c < 2 ? "not" : "taken");
    }
    return failures;
}

/* plans [whole] */
int main(int argc, char **)
{
    const bool whole = argc > 1;
    int checks = 0, failures = 0;
    if (!load()) return puts("no cuDNN 9"), 77;
    set_attribute = cudnn.BackendSetAttribute;
    cudnn.BackendSetAttribute = set_for_device;
    if (cudnn.GetVersion() < 90800 || !describe_device("NVIDIA H100 80GB HBM3", 900, 132, 232448, 52428800))
        return puts("no device can be described"), 77;
    failures += check_convolutions(&checks);
    failures += check_limits(&checks);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver && dlsym(driver, "hapt_accepts_anything")) {
        failures += check_attention("H100", true, whole, &checks);
        failures += !describe_device("NVIDIA A100-SXM4-80GB", 800, 108, 166912, 41943040);
        failures += check_attention("A100", true, whole, &checks);
        failures += !describe_device("Tesla T4", 750, 40, 65536, 4194304);
        failures += check_attention("T4", false, whole, &checks);
    } else {
        puts("attention: no driver that accepts anything");
    }
    printf("cuDNN %zu: %d checks, %d failed\n", cudnn.GetVersion(), checks, failures);
    return failures > 0;
}
