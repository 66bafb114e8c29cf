/*
 * Runs operators one at a time on a device (HAPT_TEST_BACKEND, cuda by default). Operands are read from files and
 * results are written to files, so that another program can compare them. Each line of the standard input is a call:
 *     attention bf16 integer 8 1 input qkv.bin bf16 1 1024 1536 output out.bin bf16 1 1024 512 output lse.bin fp32 1 8
 *     1024
 * in the terms of the operator table. `real` and numbers follow the name like `integer`. A file is the dense tensor,
 * row-major. Prints one line per call:
 *     attention 0.000123
 * This is the time of a run in seconds, by the device's clock (by the host's if the device has none). It is the least
 * of some rounds of RUNS runs. RUNS is the only argument (0: only the first run).
 */
#include <errno.h>

#include "hapt/device.h"
#include "test.h"

enum { WORDS = 128, LINE_CHARS = 4096, PATH_CHARS = 1024, ROUNDS = 3 };

struct operand {
    char path[PATH_CHARS];
    size_t bytes;
};

static const struct hapt_backend *backend;
static struct hapt_device *device;
static struct hapt_queue *queue;

static void stop(const char *what, const char *about)
{
    fprintf(stderr, "operator: error: %s: %s\n", what, about);
    exit(1);
}

static void must(enum hapt_status status, const char *what)
{
    if (status != HAPT_OK) stop(what, hapt_fail_message());
}

static void finish(const char *what)
{
    must(backend->wait(backend->record(queue)), what);
}

/* Copies through `host` [bytes]. */
static void from_file(const struct operand *operand, void *host, void *to)
{
    FILE *file = fopen(operand->path, "rb");
    if (!file || fread(host, 1, operand->bytes, file) != operand->bytes)
        stop(operand->path, file ? "it is too short" : strerror(errno));
    fclose(file);
    must(backend->copy(queue, to, host, operand->bytes), operand->path);
    finish(operand->path);
}

static void to_file(const struct operand *operand, void *host, const void *from)
{
    must(backend->copy(queue, host, from, operand->bytes), operand->path);
    finish(operand->path);
    FILE *file = fopen(operand->path, "wb");
    if (!file || fwrite(host, 1, operand->bytes, file) != operand->bytes || fclose(file) != 0)
        stop(operand->path, strerror(errno));
}

/* FILE TYPE SHAPE...: returns the number of words. */
static int parse_operand(char *const *word, int words, struct operand *operand, struct hapt_view *view)
{
    int used = 2;
    if (words < 3 || !hapt_dtype_parse(word[1], &view->dtype)) stop("an operand", "is not FILE TYPE SHAPE...");
    snprintf(operand->path, sizeof operand->path, "%s", word[0]);
    for (; used < words && view->dims < HAPT_MAX_DIMS && word[used][0] >= '0' && word[used][0] <= '9'; used++)
        view->shape[view->dims++] = strtoll(word[used], NULL, 10);
    operand->bytes = (size_t)hapt_view_elements(view) * hapt_dtype_bytes(view->dtype);
    return used;
}

static int parse_numbers(char *const *word, int words, int64_t *integer, double *real)
{
    int used = 0;
    for (; used < words && used < HAPT_MAX_ATTRIBUTES && strchr("-.0123456789", word[used][0]); used++) {
        if (integer) integer[used] = strtoll(word[used], NULL, 10);
        if (real) real[used] = strtod(word[used], NULL);
    }
    return used;
}

static void parse_call(char *const *word, int words, struct hapt_call *call, struct operand *input,
                       struct operand *output)
{
    for (int w = 0; w < words;) {
        const char *key = word[w++];
        if (strcmp(key, "integer") == 0)
            w += parse_numbers(word + w, words - w, call->integer, NULL);
        else if (strcmp(key, "real") == 0)
            w += parse_numbers(word + w, words - w, NULL, call->real);
        else if (strcmp(key, "input") == 0 && call->input_count < HAPT_MAX_INPUTS)
            w += parse_operand(word + w, words - w, &input[call->input_count], &call->input[call->input_count]),
                call->input_count++;
        else if (strcmp(key, "output") == 0 && call->output_count < HAPT_MAX_OUTPUTS)
            w += parse_operand(word + w, words - w, &output[call->output_count], &call->output[call->output_count]),
                call->output_count++;
        else
            stop("no such word", key);
    }
}

/* Seconds of one run, measured over this many. */
static double run_s(const struct hapt_kernel *kernel, const struct hapt_call *call, int runs)
{
    const double start_s = hapt_time_s();
    struct hapt_event *from = backend->timestamp ? backend->timestamp(queue) : NULL;
    for (int run = 0; run < runs; run++) must(kernel->run(call, queue), kernel->op);
    struct hapt_event *to = backend->timestamp ? backend->timestamp(queue) : NULL;
    finish(kernel->op);
    return (from ? backend->elapsed_s(from, to) : hapt_time_s() - start_s) / runs;
}

static double time_s(const struct hapt_kernel *kernel, const struct hapt_call *call, int runs)
{
    double least_s = run_s(kernel, call, 1);
    for (int round = 0; round < ROUNDS && runs > 0; round++) {
        const double took_s = run_s(kernel, call, runs);
        least_s = round ? fmin(least_s, took_s) : took_s; /* the first run has loaded the kernel */
    }
    return least_s;
}

static void *reserve(size_t bytes)
{
    void *memory;
    must(backend->allocate(device, bytes ? bytes : 1, &memory), "an operand");
    return memory;
}

static void run_line(char *const *word, int words, int runs)
{
    struct hapt_call call = {.threads = 1};
    struct operand input[HAPT_MAX_INPUTS], output[HAPT_MAX_OUTPUTS];
    enum hapt_dtype dtype;
    size_t most = 1;
    if (words < 2 || !hapt_dtype_parse(word[1], &dtype)) stop(word[0], "no element type behind it");
    parse_call(word + 2, words - 2, &call, input, output);
    const struct hapt_kernel *kernel = backend->find_kernel(device, word[0], dtype);
    if (!kernel) stop(word[0], "the back end has no such kernel");
    for (int i = 0; i < call.input_count; i++) most = input[i].bytes > most ? input[i].bytes : most;
    for (int o = 0; o < call.output_count; o++) most = output[o].bytes > most ? output[o].bytes : most;
    void *host = malloc(most);
    if (!host) stop(word[0], "no memory");
    for (int i = 0; i < call.input_count; i++) from_file(&input[i], host, call.input[i].data = reserve(input[i].bytes));
    for (int o = 0; o < call.output_count; o++) call.output[o].data = reserve(output[o].bytes);
    call.workspace_bytes = kernel->workspace_bytes ? kernel->workspace_bytes(&call) : 0;
    call.workspace = reserve(call.workspace_bytes);
    printf("%s %.9f\n", word[0], time_s(kernel, &call, runs));
    fflush(stdout);
    for (int o = 0; o < call.output_count; o++) to_file(&output[o], host, call.output[o].data);
    for (int i = 0; i < call.input_count; i++) backend->free(device, call.input[i].data);
    for (int o = 0; o < call.output_count; o++) backend->free(device, call.output[o].data);
    backend->free(device, call.workspace);
    free(host);
}

int main(int argc, char **argv)
{
    const char *name = getenv("HAPT_TEST_BACKEND"), *reason = "";
    char line[LINE_CHARS], *word[WORDS];
    backend = hapt_backend_find(name ? name : "cuda");
    if (!backend || backend->device_count(&reason) == 0) return printf("no device: %s\n", reason), 77;
    must(backend->open(0, 1, 0, &device), "the device");
    queue = backend->queue(device, HAPT_QUEUE_COMPUTE);
    while (fgets(line, sizeof line, stdin)) {
        int words = 0;
        for (char *at = strtok(line, " \n"); at && words < WORDS; at = strtok(NULL, " \n")) word[words++] = at;
        if (words > 0) run_line(word, words, argc > 1 ? atoi(argv[1]) : 0);
    }
    backend->close(device);
    return 0;
}
