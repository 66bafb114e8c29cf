/* Parses and prints numbers with units. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "hapt/config.h"

struct unit {
    const char *name;
    double factor;
};

static bool parse(const char *text, const struct unit *units, double *value)
{
    char *end;
    const double number = strtod(text, &end);
    if (end == text || !isfinite(number)) return false;
    while (isspace((unsigned char)*end)) end++;
    for (const struct unit *unit = units; unit->name; unit++)
        if (!strcasecmp(end, unit->name)) {
            *value = number * unit->factor;
            return isfinite(*value);
        }
    return false;
}

bool hapt_units_parse_bytes(const char *text, double *bytes)
{
    static const struct unit units[] = {{"", 1},         {"B", 1},        {"byte", 1},     {"kB", 1e3},
                                        {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},    {"KiB", 1024},
                                        {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {NULL, 0}};
    /* "Mb" often means megabit, so it is refused. */
    const size_t length = strlen(text);
    return (length == 0 || text[length - 1] != 'b') && parse(text, units, bytes);
}

/* Case is ignored, but "Gb/s" is refused as ambiguous: write Gbit/s or GB/s. */
bool hapt_units_parse_bandwidth(const char *text, double *bytes_per_s)
{
    static const struct unit units[] = {{"", 1},           {"B/s", 1},        {"byte/s", 1},     {"kB/s", 1e3},
                                        {"MB/s", 1e6},     {"GB/s", 1e9},     {"TB/s", 1e12},    {"KiB/s", 1024},
                                        {"MiB/s", 0x1p20}, {"GiB/s", 0x1p30}, {"bit/s", 0.125},  {"kbit/s", 125},
                                        {"Mbit/s", 125e3}, {"Gbit/s", 125e6}, {"Tbit/s", 125e9}, {"bps", 0.125},
                                        {"kbps", 125},     {"Mbps", 125e3},   {"Gbps", 125e6},   {NULL, 0}};
    const char *slash = strchr(text, '/');
    if (slash && slash > text && slash[-1] == 'b') return false;
    return parse(text, units, bytes_per_s);
}

bool hapt_units_parse_time(const char *text, double *seconds)
{
    static const struct unit units[] = {{"", 1},      {"s", 1},    {"ms", 1e-3}, {"us", 1e-6},
                                        {"ns", 1e-9}, {"min", 60}, {"h", 3600},  {NULL, 0}};
    return parse(text, units, seconds);
}

bool hapt_units_parse_flops(const char *text, double *flop_per_s)
{
    static const struct unit units[] = {{"", 1},           {"FLOP/s", 1},     {"MFLOP/s", 1e6}, {"GFLOP/s", 1e9},
                                        {"TFLOP/s", 1e12}, {"PFLOP/s", 1e15}, {NULL, 0}};
    return parse(text, units, flop_per_s);
}

static const char *format(double value, const char *unit, char buffer[32])
{
    static const char *const prefix[] = {"", "k", "M", "G", "T", "P"};
    int step = 0;
    while (fabs(value) >= 999.5 && step < 5) {
        value /= 1000;
        step++;
    }
    const int digits = step == 0 && value == floor(value) ? 0 : fabs(value) < 9.995 ? 2 : fabs(value) < 99.95 ? 1 : 0;
    snprintf(buffer, 32, "%.*f %s%s", digits, value, prefix[step], unit);
    return buffer;
}

const char *hapt_units_bytes(double bytes, char buffer[32])
{
    return format(bytes, "B", buffer);
}

const char *hapt_units_bandwidth(double bytes_per_s, char buffer[32])
{
    return format(bytes_per_s, "B/s", buffer);
}

const char *hapt_units_bits(double bytes_per_s, char buffer[32])
{
    return format(8 * bytes_per_s, "bit/s", buffer);
}

const char *hapt_units_flops(double flop_per_s, char buffer[32])
{
    return format(flop_per_s, "FLOP/s", buffer);
}

const char *hapt_units_time(double seconds, char buffer[32])
{
    const double size = fabs(seconds);
    if (size == 0)
        snprintf(buffer, 32, "0 s");
    else if (size < 1e-3)
        snprintf(buffer, 32, "%.1f us", seconds * 1e6);
    else if (size < 1)
        snprintf(buffer, 32, "%.2f ms", seconds * 1e3);
    else if (size < 120)
        snprintf(buffer, 32, "%.2f s", seconds);
    else if (size < 1200)
        snprintf(buffer, 32, "%.1f s", seconds);
    else if (size < 7200)
        snprintf(buffer, 32, "%.1f min", seconds / 60);
    else
        snprintf(buffer, 32, "%.2f h", seconds / 3600);
    return buffer;
}
