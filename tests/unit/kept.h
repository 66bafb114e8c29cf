/*
 * Numbers that the first process of a test computes and the later ones read again, by a key of all that they depend on.
 * They lie in a file without a name, whose descriptor the processes inherit: one record after another of a key, a count
 * and as many doubles.
 */
#ifndef HAPT_TEST_KEPT_H
#define HAPT_TEST_KEPT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct kept_record {
    uint64_t key;
    int64_t count;
    double value[];
};

/* FNV-1a, eight bytes at a time; size is a multiple of 8. */
static inline uint64_t kept_hash(uint64_t hash, const void *data, size_t size)
{
    for (size_t i = 0; i < size; i += sizeof hash) {
        uint64_t word;
        memcpy(&word, (const char *)data + i, sizeof word);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 32; /* so that the upper bits reach the lower ones */
    }
    return hash;
}

/* HAPT_TEST_KEPT_WRITE, HAPT_TEST_KEPT_READ: the descriptor. */
static inline int kept_file(const char *name)
{
    const char *text = getenv(name);
    return text ? (int)strtol(text, NULL, 10) : -1;
}

/* The next process writes, those after it and this one read. */
static inline void kept_open(void)
{
    char text[16];
    snprintf(text, sizeof text, "%d", memfd_create("kept", 0));
    setenv("HAPT_TEST_KEPT_WRITE", text, 1);
}

static inline void kept_written(void)
{
    const char *text = getenv("HAPT_TEST_KEPT_WRITE");
    if (!text) return;
    setenv("HAPT_TEST_KEPT_READ", text, 1);
    unsetenv("HAPT_TEST_KEPT_WRITE");
}

/* Records are asked for in nearly the order in which they were written: the search goes on behind the last one found,
 * once around. */
static inline bool kept_find(uint64_t key, int64_t count, double *value)
{
    static const char *records;
    static size_t size, place;
    const int file = kept_file("HAPT_TEST_KEPT_READ");
    if (file < 0) return false;
    if (!records) {
        const off_t end = lseek(file, 0, SEEK_END);
        size = end > 0 ? (size_t)end : 0;
        records = size ? mmap(NULL, size, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    }
    if (records == MAP_FAILED) return false;
    for (size_t passed = 0; passed < size;) {
        const struct kept_record *record = (const void *)(records + place);
        const size_t bytes = sizeof *record + (size_t)record->count * sizeof *value;
        passed += bytes;
        place = (place + bytes) % size;
        if (record->key != key || record->count != count) continue;
        memcpy(value, record->value, (size_t)count * sizeof *value);
        return true;
    }
    return false;
}

static inline void kept_add(uint64_t key, int64_t count, const double *value)
{
    const int file = kept_file("HAPT_TEST_KEPT_WRITE");
    const struct kept_record record = {key, count};
    const size_t bytes = (size_t)count * sizeof *value;
    if (file < 0) return;
    if (write(file, &record, sizeof record) != sizeof record || write(file, value, bytes) != (ssize_t)bytes) {
        fprintf(stderr, "cannot keep expected numbers\n");
        exit(1);
    }
}

#endif
