/* Base: arenas, units, options, HDF5 files. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "test.h"

#include "hapt/config.h"
#include "hapt/dtype.h"
#include "hapt/h5.h"

static struct hapt_arena arena;

static void arenas_align_and_zero(void)
{
    struct hapt_arena local;
    hapt_arena_init(&local);
    uint64_t state = 7;
    for (int i = 0; i < 2000; i++) {
        const size_t bytes = hapt_random_next(&state) % (i % 100 == 0 ? 600000 : 900);
        unsigned char *memory = hapt_arena_alloc(&local, bytes, 1);
        CHECK(memory && (uintptr_t)memory % 64 == 0);
        for (size_t k = 0; k < bytes; k += 61) CHECK(memory[k] == 0);
        memset(memory, 0xff, bytes);
    }
    CHECK(hapt_arena_alloc(&local, SIZE_MAX / 4, 8) == NULL);
    hapt_fail_reset();
    /* After a reset an arena gives zeroed memory again, from the blocks that it kept. */
    for (int round = 0; round < 3; round++) {
        hapt_arena_reset(&local);
        CHECK(local.used_bytes == 0);
        unsigned char *first = hapt_arena_alloc(&local, 1000, 1), *large = hapt_arena_alloc(&local, 1 << 20, 1);
        for (int i = 0; i < 1000; i++) CHECK(first[i] == 0 && large[i] == 0 && large[(1 << 20) - 1 - i] == 0);
        memset(first, 0xff, 1000);
        memset(large, 0xff, 1 << 20);
    }
    /* a request for more memory than the host has is refused before it is touched */
    const double available = hapt_memory_available();
    CHECK(available > 0);
    if (available < 1e15) CHECK(hapt_arena_alloc(&local, (size_t)(available * 1.5) + (1 << 30), 1) == NULL);
    hapt_fail_reset();
    hapt_arena_release(&local);
    hapt_arena_reset(&local);
    CHECK(hapt_arena_alloc(&local, 1, 1) != NULL);
    hapt_arena_release(&local);
}

static void *fail_elsewhere(void *unused)
{
    hapt_fail(HAPT_ERR_IO, NULL, "of a thread");
    return unused;
}

/* A diverted failure leaves the process's record as it is, on this thread alone. */
static void failures_are_diverted(void)
{
    struct hapt_failure outer = {0}, inner = {0};
    pthread_t thread;
    CHECK(hapt_fail_divert(&outer) == NULL);
    CHECK(hapt_fail(HAPT_ERR_IO, "a hint", "first") == HAPT_ERR_IO);
    CHECK(hapt_fail_divert(&inner) == &outer);
    CHECK(strcmp(hapt_fail_message(), "") == 0);
    hapt_fail(HAPT_ERR_INPUT, NULL, "second");
    CHECK(strcmp(hapt_fail_message(), "second") == 0);
    CHECK(pthread_create(&thread, NULL, fail_elsewhere, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK(hapt_fail_divert(&outer) == &inner);
    hapt_fail_reset();
    CHECK(outer.status == HAPT_OK && inner.status == HAPT_ERR_INPUT);
    CHECK(hapt_fail_divert(NULL) == &outer);
    CHECK(strcmp(hapt_fail_message(), "of a thread") == 0);
    hapt_fail_reset();
    CHECK(strcmp(hapt_fail_message(), "") == 0);
}

/* 2026-11-29 18:41:32 UTC, in whatever zone the test runs. */
static void times_have_a_zone(void)
{
    char text[HAPT_TIME_ISO_CHARS];
    struct tm local = {0};
    hapt_time_iso(1795977692.125, text);
    const int offset_s = (text[23] == '-' ? -1 : 1) * (atoi(text + 24) * 60 + atoi(text + 27)) * 60;
    CHECK(strlen(text) == 29 && text[10] == 'T' && strncmp(text + 19, ".125", 4) == 0);
    CHECK(sscanf(text, "%d-%d-%dT%d:%d:%d", &local.tm_year, &local.tm_mon, &local.tm_mday, &local.tm_hour,
                 &local.tm_min, &local.tm_sec) == 6);
    local.tm_year -= 1900;
    local.tm_mon -= 1;
    CHECK_MESSAGE(timegm(&local) - offset_s == 1795977692, "%s", text);
    CHECK(hapt_time_epoch_s() > 1.7e9);
}

static void units_parse(void)
{
    double value;
    CHECK(hapt_units_parse_bytes("400 MB", &value) && value == 400e6);
    CHECK(hapt_units_parse_bytes("1.5GiB", &value) && value == 1.5 * 0x1p30);
    CHECK(!hapt_units_parse_bytes("400 Mbit", &value));
    CHECK(hapt_units_parse_bandwidth("200 Mbit/s", &value) && value == 25e6);
    CHECK(hapt_units_parse_bandwidth("25 GB/s", &value) && value == 25e9);
    CHECK(!hapt_units_parse_bandwidth("25 Gb/s", &value));
    CHECK(!hapt_units_parse_bandwidth("fast", &value) && !hapt_units_parse_bandwidth("", &value));
    CHECK(hapt_units_parse_time("50 us", &value) && fabs(value - 50e-6) < 1e-18);
    CHECK(!hapt_units_parse_time("nan s", &value) && !hapt_units_parse_time("inf", &value));
    char buffer[32];
    CHECK(!strcmp(hapt_units_bytes(1.5e9, buffer), "1.50 GB"));
    CHECK(!strcmp(hapt_units_time(0.00123, buffer), "1.23 ms"));
}

static enum hapt_status parse(struct hapt_config **config, int count, const char **word)
{
    return hapt_config_parse(count, (char **)word, &arena, config);
}

static void options_parse(void)
{
    struct hapt_config *config = NULL;
    CHECK_OK(parse(&config, 6, (const char *[]){"hapt", "plan", "--microbatches=4", "--json", "--schedule", "gpipe"}));
    CHECK(hapt_config_command(config) == HAPT_COMMAND_PLAN && hapt_config_int(config, "microbatches") == 4);
    CHECK(hapt_config_bool(config, "json") && !strcmp(hapt_config_text(config, "schedule"), "gpipe"));
    CHECK(!hapt_config_given(config, "hide-threshold") && hapt_config_real(config, "hide-threshold") == 0.02);
    CHECK_OK(hapt_config_default(config, "schedule", "1f1b"));
    CHECK(!strcmp(hapt_config_text(config, "schedule"), "gpipe"));
    CHECK_FAILS(hapt_config_default(config, "schedule", "none"), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_config_default(config, "json", "yes"), HAPT_ERR_INPUT);
    const char *bad[][2] = {{"--microbatch", "4"},  {"--microbatches", "0"}, {"--microbatches", "1.5"},
                            {"--schedule", "fast"}, {"--hidden", "4"},       {"--hide-threshold", "nan"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(parse(&config, 4, (const char *[]){"hapt", "plan", bad[i][0], bad[i][1]}), HAPT_ERR_USAGE);
    CHECK_FAILS(parse(&config, 3, (const char *[]){"hapt", "plan", "--microbatches"}), HAPT_ERR_USAGE);
    CHECK_FAILS(parse(&config, 3, (const char *[]){"hapt", "--json", "--json"}), HAPT_ERR_USAGE);
    CHECK_FAILS(parse(&config, 2, (const char *[]){"hapt", "fly"}), HAPT_ERR_USAGE);
}

/* Every fp16 number is an fp32 number and converts back. Between two neighbours the nearer one is chosen, and the even
 * one in the middle. */
static void f16_rounds_to_nearest_even(void)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const float value = hapt_f16_to_f32((uint16_t)bits);
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        if (exponent == 31) {
            CHECK(fraction ? isnan(value) && isnan(hapt_f16_to_f32(hapt_f16_from_f32(value)))
                           : isinf(value) && hapt_f16_from_f32(value) == bits);
            continue;
        }
        const double expected = ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
        CHECK(value == (bits & 0x8000u ? -expected : expected));
        CHECK(hapt_f16_from_f32(value) == bits);
        if (bits & 0x8000u || exponent == 30) continue;
        const double above = hapt_f16_to_f32((uint16_t)(bits + 1)), middle = 0.5 * (expected + above);
        CHECK(hapt_f16_from_f32((float)middle) == (bits & 1 ? bits + 1 : bits));
        CHECK(hapt_f16_from_f32(nextafterf((float)middle, 0)) == bits);
        CHECK(hapt_f16_from_f32(nextafterf((float)middle, INFINITY)) == bits + 1);
    }
    CHECK(hapt_f16_from_f32(65519.99f) == 0x7bff && hapt_f16_from_f32(65520.0f) == 0x7c00 &&
          hapt_f16_from_f32(-1e30f) == 0xfc00);
    CHECK(hapt_f16_from_f32(0x1p-25f) == 0 && hapt_f16_from_f32(0x1.000002p-25f) == 1);
}

static void bf16_rounds_to_nearest_even(void)
{
    uint64_t state = 3;
    for (int i = 0; i < 100000; i++) {
        const uint32_t bits = (uint32_t)hapt_random_next(&state);
        float value;
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value)) continue;
        const float near = hapt_bf16_to_f32(hapt_bf16_from_f32(value));
        if (!isfinite(near)) continue;
        const float below = hapt_bf16_to_f32((uint16_t)(bits >> 16)),
                    above = hapt_bf16_to_f32((uint16_t)((bits >> 16) + 1));
        CHECK(fabs((double)near - value) <= fabs((double)below - value));
        CHECK(!isfinite(above) || fabs((double)near - value) <= fabs((double)above - value));
    }
}

static void h5_round_trip(void)
{
    const char *path = "build/test-base.h5";
    struct hapt_h5 *file = NULL;
    const double table[2][3] = {{1, 2, NAN}, {4, 5, 6}};
    const char *names[] = {"alpha", "", "a longer one"};
    CHECK_OK(hapt_h5_create(path, "hapt-test", 2, &file));
    CHECK_OK(hapt_h5_write(file, "/a/b/table", HAPT_H5_F64, 2, (int64_t[]){2, 3}, table, "s"));
    CHECK_OK(hapt_h5_write(file, "/empty", HAPT_H5_I32, 1, (int64_t[]){0}, table, ""));
    CHECK_OK(hapt_h5_write_strings(file, "/names", 3, names));
    CHECK_OK(hapt_h5_write_attribute_real(file, "/a", "speed", 2.5, "m/s"));
    CHECK_OK(hapt_h5_commit(file));
    CHECK_FAILS(hapt_h5_open(path, "hapt-other", 2, false, &file), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_h5_open(path, "hapt-test", 1, false, &file), HAPT_ERR_INPUT);
    CHECK_OK(hapt_h5_open(path, "hapt-test", 2, false, &file));
    int64_t shape[2] = {-1, 3};
    void *data = NULL;
    CHECK_OK(hapt_h5_read(file, "/a/b/table", HAPT_H5_F64, 2, shape, 100, &arena, &data));
    CHECK(shape[0] == 2 && isnan(((double *)data)[2]) && ((double *)data)[5] == 6);
    CHECK_FAILS(hapt_h5_read(file, "/a/b/table", HAPT_H5_F64, 2, shape, 5, &arena, &data), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_h5_read(file, "/a/b/table", HAPT_H5_F64, 1, shape, 100, &arena, &data), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_h5_read(file, "/none", HAPT_H5_F64, 1, shape, 100, &arena, &data), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_h5_read(file, "/names", HAPT_H5_F64, 1, shape, 100, &arena, &data), HAPT_ERR_INPUT);
    double row[3];
    CHECK_OK(hapt_h5_read_rows(file, "/a/b/table", HAPT_H5_F64, 1, 1, row));
    CHECK(row[0] == 4 && row[2] == 6);
    CHECK_FAILS(hapt_h5_read_rows(file, "/a/b/table", HAPT_H5_F64, 1, 2, row), HAPT_ERR_INPUT);
    int64_t count = 0;
    const char **text = NULL;
    CHECK_OK(hapt_h5_read_strings(file, "/names", 10, &arena, &count, &text));
    CHECK(count == 3 && !strcmp(text[2], names[2]) && !text[1][0]);
    double speed = 0;
    CHECK_OK(hapt_h5_read_attribute_real(file, "/a", "speed", &speed));
    CHECK(speed == 2.5 && hapt_h5_exists(file, "/a/b") && !hapt_h5_exists(file, "/a/c/d"));
    CHECK_OK(hapt_h5_list(file, "/", 10, &arena, &count, &text));
    CHECK(count == 3 && !strcmp(text[0], "a"));
    hapt_h5_close(file);
}

static void h5_survives_damage(void)
{
    const char *path = "build/test-base.h5", *damaged = "build/test-base-damaged.h5";
    FILE *in = fopen(path, "rb");
    static unsigned char bytes[1 << 16];
    const size_t size = fread(bytes, 1, sizeof bytes, in);
    fclose(in);
    CHECK(size > 500);
    uint64_t state = 11;
    int silent = 0;
    for (int round = 0; round < (test_long() ? 30000 : 1000); round++) {
        struct hapt_arena local;
        hapt_arena_init(&local);
        const size_t at = hapt_random_next(&state) % size, length = round % 3 == 0 ? at : size;
        const unsigned char kept = bytes[at];
        bytes[at] ^= (unsigned char)(1u << hapt_random_next(&state) % 8);
        FILE *out = fopen(damaged, "wb");
        fwrite(bytes, 1, length, out);
        fclose(out);
        bytes[at] = kept;
        struct hapt_h5 *file = NULL;
        int64_t shape[2] = {-1, -1};
        void *data = NULL;
        if (hapt_h5_open(damaged, "hapt-test", 2, false, &file) == HAPT_OK) {
            if (hapt_h5_read(file, "/a/b/table", HAPT_H5_F64, 2, shape, 100, &local, &data) == HAPT_OK)
                silent += shape[0] != 2 || ((double *)data)[5] != 6 || ((double *)data)[0] != 1;
            /* Attributes have no checksum. Any value may be read, but nothing may crash. */
            double speed;
            int64_t count;
            const char **text, *creator;
            (void)hapt_h5_read_attribute_real(file, "/a", "speed", &speed);
            (void)hapt_h5_read_attribute_text(file, "/", "creator", &local, &creator);
            (void)hapt_h5_read_strings(file, "/names", 10, &local, &count, &text);
            (void)hapt_h5_list(file, "/", 10, &local, &count, &text);
            hapt_h5_close(file);
        }
        hapt_fail_reset();
        hapt_arena_release(&local);
    }
    CHECK_MESSAGE(silent == 0, "%d damaged files read wrongly without a word", silent);
    unlink(damaged);
    unlink(path);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    hapt_arena_init(&arena);
    RUN(arenas_align_and_zero);
    RUN(failures_are_diverted);
    RUN(times_have_a_zone);
    RUN(units_parse);
    RUN(options_parse);
    RUN(f16_rounds_to_nearest_even);
    RUN(bf16_rounds_to_nearest_even);
    RUN(h5_round_trip);
    RUN(h5_survives_damage);
    hapt_arena_release(&arena);
    return test_finish();
}
