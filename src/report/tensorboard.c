#include "tensorboard.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "hapt/folder.h"

enum { MOST_PATH = 4096, MOST_EVENT = 1024 };

/* Field numbers of Event, Summary, Summary.Value and SessionLog. */
enum { EVENT_WALL_TIME = 1, EVENT_STEP = 2, EVENT_FILE_VERSION = 3, EVENT_SUMMARY = 5, EVENT_SESSION_LOG = 7 };
enum { SUMMARY_VALUE = 1, VALUE_TAG = 1, VALUE_SIMPLE = 2, SESSION_STATUS = 1, SESSION_START = 1 };
/* Wire types of protocol buffers. */
enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

/* ---- Protocol buffers ---- */

struct message {
    unsigned char byte[MOST_EVENT];
    size_t count;
};

static void put_bytes(struct message *message, const void *bytes, size_t count)
{
    HAPT_ASSERT(message->count + count <= sizeof message->byte);
    memcpy(message->byte + message->count, bytes, count);
    message->count += count;
}

/* `bytes` bytes of the value, the lowest first. */
static void put_fixed(struct message *message, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) put_bytes(message, &(unsigned char){(unsigned char)(value >> (8 * i))}, 1);
}

static void put_varint(struct message *message, uint64_t value)
{
    for (; value >= 0x80; value >>= 7) put_bytes(message, &(unsigned char){(unsigned char)((value & 0x7f) | 0x80)}, 1);
    put_bytes(message, &(unsigned char){(unsigned char)value}, 1);
}

static void put_key(struct message *message, int field, int wire)
{
    put_varint(message, (uint64_t)(field << 3 | wire));
}

static void put_double(struct message *message, int field, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(message, field, WIRE_64);
    put_fixed(message, bits, 8);
}

static void put_float(struct message *message, int field, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(message, field, WIRE_32);
    put_fixed(message, bits, 4);
}

static void put_number(struct message *message, int field, int64_t value)
{
    put_key(message, field, WIRE_VARINT);
    put_varint(message, (uint64_t)value);
}

static void put_block(struct message *message, int field, const void *bytes, size_t count)
{
    put_key(message, field, WIRE_BYTES);
    put_varint(message, count);
    put_bytes(message, bytes, count);
}

/* Adds a value to a Summary; one that is unknown is left out. */
static void put_value(struct message *summary, const char *tag, double value)
{
    struct message one = {.count = 0};
    if (isnan(value)) return;
    put_block(&one, VALUE_TAG, tag, strlen(tag));
    put_float(&one, VALUE_SIMPLE, (float)value);
    put_block(summary, SUMMARY_VALUE, one.byte, one.count);
}

/* ---- Records ---- */

/* CRC-32C (Castagnoli), reflected, as in RFC 3720. */
static uint32_t crc32c(const unsigned char *byte, size_t count)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < count; i++) {
        crc ^= byte[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* TFRecord masks checksums, because data may hold checksums. */
static uint32_t masked_crc(const unsigned char *byte, size_t count)
{
    const uint32_t crc = crc32c(byte, count);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

static bool write_record(struct append *file, const struct message *event)
{
    struct message record = {.count = 0};
    put_fixed(&record, event->count, 8);
    put_fixed(&record, masked_crc(record.byte, 8), 4);
    put_bytes(&record, event->byte, event->count);
    put_fixed(&record, masked_crc(event->byte, event->count), 4);
    return append_write(file, record.byte, record.count);
}

static void begin_event(struct message *event, double epoch_s, int64_t step)
{
    event->count = 0;
    put_double(event, EVENT_WALL_TIME, epoch_s);
    put_number(event, EVENT_STEP, step);
}

static bool write_summary(struct append *file, double epoch_s, int64_t step, const struct message *summary)
{
    struct message event;
    begin_event(&event, epoch_s, step);
    put_block(&event, EVENT_SUMMARY, summary->byte, summary->count);
    return write_record(file, &event);
}

/* ---- The file ---- */

/* TensorBoard drops the events of earlier files from this step on: they come after the checkpoint that is resumed. */
static int64_t purge_step(const struct hapt_train_result *result)
{
    return result->first_step > 0 ? result->first_step + 1 : 0; /* also the validation before the first step */
}

static bool write_begin(struct append *file, double epoch_s, int64_t purged)
{
    static const char version[] = "brain.Event:2";
    struct message event, session = {.count = 0};
    begin_event(&event, epoch_s, 0);
    put_block(&event, EVENT_FILE_VERSION, version, sizeof version - 1);
    if (!write_record(file, &event)) return false;
    put_number(&session, SESSION_STATUS, SESSION_START);
    begin_event(&event, epoch_s, purged);
    put_block(&event, EVENT_SESSION_LOG, session.byte, session.count);
    return write_record(file, &event);
}

/* A link in the place of the folder is not followed. */
static bool make_folder(const char *path)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST) return false;
    if (hapt_folder_is(path)) return true;
    errno = ENOTDIR;
    return false;
}

/* The time comes first in the name, because TensorBoard reads files by name. */
static bool create(struct append *file, const char *folder, double epoch_s)
{
    char path[MOST_PATH];
    const int length =
        snprintf(path, sizeof path, "%s/tensorboard/events.out.tfevents.%017.6f.%s", folder, epoch_s, hapt_env_host(0));
    if (length >= MOST_PATH) {
        errno = ENAMETOOLONG;
        return false;
    }
    char *slash = strrchr(path, '/');
    *slash = '\0';
    if (!make_folder(path)) return false;
    *slash = '/';
    return append_open(file, path) && append_cut(file, 0);
}

bool tensorboard_open(struct tensorboard *events, const char *folder, const struct hapt_train_result *result,
                      double epoch_s)
{
    const struct hapt_history *history = &result->history;
    const int64_t first_step = purge_step(result);
    *events = (struct tensorboard){.file.descriptor = -1, .written = result->first_step};
    while (events->validations < history->validation_count &&
           history->validation[events->validations].step < first_step)
        events->validations++;
    if (create(&events->file, folder, epoch_s) && write_begin(&events->file, epoch_s, first_step)) return true;
    const int error = errno;
    append_close(&events->file);
    errno = error;
    return false;
}

static bool write_step(struct append *file, const struct hapt_train_result *result, int64_t index, double epoch_s)
{
    const struct hapt_history *history = &result->history;
    const double time_s = history->time_s[index];
    struct message summary = {.count = 0};
    char rate[64];
    snprintf(rate, sizeof rate, "train/%ss_per_second", result->item);
    put_value(&summary, "train/loss", history->loss[index]);
    put_value(&summary, "train/gradient_norm", history->gradient_norm[index]);
    put_value(&summary, "train/learning_rate", history->learning_rate[index]);
    put_value(&summary, "train/step_time_s", time_s);
    put_value(&summary, rate, (double)result->items_per_step / time_s);
    put_value(&summary, "train/mfu", hapt_train_mfu(result, time_s));
    put_value(&summary, "memory/bytes", hapt_train_memory(result));
    return write_summary(file, epoch_s, index + 1, &summary);
}

static bool write_validation(struct append *file, const struct hapt_validation *validation, double epoch_s)
{
    struct message summary = {.count = 0};
    put_value(&summary, "validation/loss", validation->loss);
    put_value(&summary, "validation/top1", validation->top1);
    return write_summary(file, epoch_s, validation->step, &summary);
}

bool tensorboard_append(struct tensorboard *events, const struct hapt_train_result *result, double epoch_s)
{
    const struct hapt_history *history = &result->history;
    for (; events->written < history->count; events->written++)
        if (!write_step(&events->file, result, events->written, epoch_s)) return false;
    for (; events->validations < history->validation_count; events->validations++)
        if (!write_validation(&events->file, &history->validation[events->validations], epoch_s)) return false;
    return true;
}
