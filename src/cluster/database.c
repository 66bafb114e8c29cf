/*
 * The device database: dense peak rates, memory and memory bandwidth from the makers' data sheets.
 *
 * fp16 and bf16 rates are those of the matrix units with fp32 accumulation, without sparsity. The fp32 rate is the
 * vector rate (no TF32), because fp32 training uses that. Clocks are boost clocks, as in the data sheets.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "database.h"

#define GB 1e9
#define TFLOPS 1e12

/* Copies over 16 lanes of PCI Express, per direction. 22 GB/s as in bench/offload.c; 45 GB/s: an H200 that fetched
 * weights while it trained. */
#define PCIE_3 (12 * GB)
#define PCIE_4 (22 * GB)
#define PCIE_5 (45 * GB)
/* NVLink-C2C of Grace Hopper: 900 GB/s both ways in the data sheet. */
#define C2C (450 * GB)

/* clang-format off: tables */
#define GPU(device_name, back_end, fp32, bf16, fp16, memory, bandwidth)                                      \
    {                                                                                                        \
        .name = device_name, .backend = back_end, .memory_bytes = (memory)*GB,                               \
        .peak_flops = {[HAPT_F32] = (fp32)*TFLOPS, [HAPT_BF16] = (bf16)*TFLOPS, [HAPT_F16] = (fp16)*TFLOPS}, \
        .memory_bandwidth = (bandwidth)*GB, .slowdown = 1                                                    \
    }
/* clang-format on */

static const struct {
    struct hapt_device_spec spec;
    double peer_bandwidth; /* byte/s per direction to another device of the node */
    double host_bandwidth; /* byte/s per direction to page-locked memory; 0: unknown */
} database[] = {
    /* NVIDIA A100 Tensor Core GPU data sheet (June 2021), SXM4; NVLink 3: 600 GB/s both ways. */
    {GPU("A100-40GB", "cuda", 19.5, 312, 312, 40, 1555), 300 * GB, PCIE_4},
    {GPU("A100-80GB", "cuda", 19.5, 312, 312, 80, 2039), 300 * GB, PCIE_4},
    /* NVIDIA V100 Tensor Core GPU data sheet (January 2020), SXM2; NVLink 2: 300 GB/s both ways. No bf16. */
    {GPU("V100-16GB", "cuda", 15.7, 0, 125, 16, 900), 150 * GB, PCIE_3},
    {GPU("V100-32GB", "cuda", 15.7, 0, 125, 32, 900), 150 * GB, PCIE_3},
    /* NVIDIA Tesla P100 data sheet (October 2016), SXM2; NVLink 1: 160 GB/s both ways. fp16 without matrix units. */
    {GPU("P100", "cuda", 10.6, 0, 21.2, 16, 732), 80 * GB, PCIE_3},
    /* NVIDIA T4 Tensor Core GPU data sheet (March 2019); PCI Express 3.0 x16. */
    {GPU("T4", "cuda", 8.1, 0, 65, 16, 320), 12 * GB, PCIE_3},
    /* NVIDIA H100 Tensor Core GPU data sheet (2023), SXM5, half of the sparse figures; NVLink 4: 900 GB/s both ways. */
    {GPU("H100", "cuda", 67, 989.5, 989.5, 80, 3350), 450 * GB, PCIE_5},
    /* NVIDIA H200 Tensor Core GPU data sheet (2024), SXM, half of the sparse figures. */
    {GPU("H200", "cuda", 67, 989.5, 989.5, 141, 4800), 450 * GB, PCIE_5},
    /* NVIDIA GH200 Grace Hopper Superchip data sheet (2024), half of the sparse figures; NVLink 4: 900 GB/s both ways.
     */
    {GPU("GH200", "cuda", 67, 989.5, 989.5, 96, 4000), 450 * GB, C2C},
    {GPU("GH200-144GB", "cuda", 67, 989.5, 989.5, 144, 4900), 450 * GB, C2C},
    /* NVIDIA Blackwell data sheet (2025), column HGX B200, half of the sparse figures; NVLink 5: 1.8 TB/s both ways. */
    {GPU("B200", "cuda", 75, 2250, 2250, 180, 7700), 900 * GB, PCIE_5},
    /* NVIDIA A10 Tensor Core GPU data sheet (2021), without sparsity; PCI Express 4.0 x16. */
    {GPU("A10", "cuda", 31.2, 125, 125, 24, 600), 25 * GB, PCIE_4},
    /* NVIDIA A30 Tensor Core GPU data sheet (2022); A40 data sheet (2022); L40S data sheet (2023, dense column of its
       table). PCI Express 4.0 x16: NVLink bridges join only pairs. */
    {GPU("A30", "cuda", 10.3, 165, 165, 24, 933), 25 * GB, PCIE_4},
    {GPU("A40", "cuda", 37.4, 149.7, 149.7, 48, 696), 25 * GB, PCIE_4},
    {GPU("L40S", "cuda", 91.6, 362.05, 362.05, 48, 864), 25 * GB, PCIE_4},
    /* NVIDIA L4 Tensor Core GPU data sheet (2023), half of the sparse figures; PCI Express 4.0 x16. */
    {GPU("L4", "cuda", 30.3, 121, 121, 24, 300), 25 * GB, PCIE_4},
    /* NVIDIA Ampere GA102 GPU architecture white paper, its tables of the RTX 3090, the RTX 3080 (10 GB) and the
       RTX A6000 (fp32 accumulation, without sparsity); PCI Express 4.0 x16. */
    {GPU("RTX-3090", "cuda", 35.6, 71, 71, 24, 936), 25 * GB, PCIE_4},
    {GPU("RTX-3080", "cuda", 29.8, 59.5, 59.5, 10, 760), 25 * GB, PCIE_4},
    {GPU("RTX-A6000", "cuda", 38.7, 154.8, 154.8, 48, 768), 25 * GB, PCIE_4},
    /* NVIDIA Ada GPU architecture white paper, appendix A (fp32 accumulation, without sparsity); PCI Express 4.0 x16.
     */
    {GPU("RTX-4090", "cuda", 82.6, 165.2, 165.2, 24, 1008), 25 * GB, PCIE_4},
    {GPU("RTX-4080", "cuda", 48.7, 97.5, 97.5, 16, 716.8), 25 * GB, PCIE_4},
    /* NVIDIA RTX Blackwell GPU architecture white paper, appendix A (fp32 accumulation, without sparsity: a quarter of
       the advertised fp16 rate); PCI Express 5.0 x16. */
    {GPU("RTX-5090", "cuda", 104.8, 209.5, 209.5, 32, 1792), 50 * GB, PCIE_5},
    /* NVIDIA Turing GPU architecture white paper, Founders Edition of the RTX 2080 Ti (fp32 accumulation: half the rate
       of fp16 accumulation); GA102 white paper, comparison with the Titan RTX, which has the full rate. No bf16. PCI
       Express 3.0 x16. */
    {GPU("RTX-2080Ti", "cuda", 14.2, 0, 56.9, 11, 616), 12 * GB, PCIE_3},
    {GPU("Titan-RTX", "cuda", 16.3, 0, 130.5, 24, 672), 12 * GB, PCIE_3},
    /* AMD Instinct MI250X and MI250 data sheets (2021): the module, fp32 vector rate. It appears as two devices, each
       half of this. */
    {GPU("MI250X", "hip", 47.9, 383, 383, 128, 3276.8), 50 * GB, PCIE_4},
    {GPU("MI250", "hip", 45.3, 362.1, 362.1, 128, 3276.8), 50 * GB, PCIE_4},
    /* AMD Instinct MI300X data sheet (2023), fp32 vector rate, without sparsity; Infinity Fabric: 128 GB/s both ways to
       each of seven other devices. */
    {GPU("MI300X", "hip", 163.4, 1307.4, 1307.4, 192, 5300), 64 * GB, PCIE_5},
    /* One core with AVX2 at 3 GHz: two fused multiply-adds of 8 lanes per cycle (Intel 64 and IA-32 optimization
       manual). Its bf16 runs at the fp32 rate. Used for planning only: binding replaces it by the host's figures. */
    {GPU("cpu", "cpu", 0.096, 0.096, 0, 4, 10), 10 * GB, 0},
};
enum { DATABASE_COUNT = sizeof database / sizeof *database };

/* From the PCI ID repository (pci-ids.ucw.cz), without cards much slower than the module of that name (H100 PCIe). */
static const struct {
    unsigned vendor, device;
    const char *name;
} pci_ids[] = {
    {0x10de, 0x20b0, "A100-40GB"}, {0x10de, 0x20f1, "A100-40GB"},  {0x10de, 0x20b2, "A100-80GB"},
    {0x10de, 0x20b5, "A100-80GB"}, {0x10de, 0x1db1, "V100-16GB"},  {0x10de, 0x1db4, "V100-16GB"},
    {0x10de, 0x1db5, "V100-32GB"}, {0x10de, 0x1db6, "V100-32GB"},  {0x10de, 0x15f8, "P100"},
    {0x10de, 0x15f9, "P100"},      {0x10de, 0x1eb8, "T4"},         {0x10de, 0x2330, "H100"},
    {0x10de, 0x2335, "H200"},      {0x10de, 0x2204, "RTX-3090"},   {0x10de, 0x2684, "RTX-4090"},
    {0x10de, 0x20b7, "A30"},       {0x10de, 0x2235, "A40"},        {0x10de, 0x26b9, "L40S"},
    {0x10de, 0x27b8, "L4"},        {0x1002, 0x7408, "MI250X"},     {0x10de, 0x2342, "GH200"},
    {0x10de, 0x2901, "B200"},      {0x10de, 0x2236, "A10"},        {0x10de, 0x2206, "RTX-3080"},
    {0x10de, 0x2216, "RTX-3080"},  {0x10de, 0x2230, "RTX-A6000"},  {0x10de, 0x2704, "RTX-4080"},
    {0x10de, 0x2b85, "RTX-5090"},  {0x10de, 0x1e04, "RTX-2080Ti"}, {0x10de, 0x1e07, "RTX-2080Ti"},
    {0x10de, 0x1e02, "Titan-RTX"}, {0x1002, 0x74a1, "MI300X"},     {0x10de, 0x2348, "GH200-144GB"},
    {0x10de, 0x1df5, "V100-16GB"},
};

/* DATABASE_COUNT: there is none. */
static int entry_of(const char *name)
{
    int i = 0;
    while (i < DATABASE_COUNT && strcasecmp(name, database[i].spec.name) != 0) i++;
    return i;
}

const struct hapt_device_spec *hapt_device_spec_find(const char *name)
{
    return hapt_device_spec_at(entry_of(name));
}

const struct hapt_device_spec *hapt_device_spec_at(int index)
{
    return index >= 0 && index < DATABASE_COUNT ? &database[index].spec : NULL;
}

double hapt_device_peer_bandwidth(const char *name)
{
    const int i = entry_of(name);
    return i < DATABASE_COUNT ? database[i].peer_bandwidth : 0;
}

double hapt_device_host_bandwidth(const char *name)
{
    const int i = entry_of(name);
    return i < DATABASE_COUNT ? database[i].host_bandwidth : 0;
}

const struct hapt_device_spec *hapt_device_spec_of_pci(unsigned vendor, unsigned device)
{
    for (size_t i = 0; i < sizeof pci_ids / sizeof *pci_ids; i++)
        if (pci_ids[i].vendor == vendor && pci_ids[i].device == device) return hapt_device_spec_find(pci_ids[i].name);
    return NULL;
}

/* Finds "RTX-4090" in "NVIDIA GeForce RTX 4090": only letters and digits are compared. A longer number is another model
 * (A30 is not A3000). */
static bool names_model(const char *name, const char *model)
{
    for (const char *start = name; *start; start++) {
        const char *n = start, *m = model;
        if (start > name && isalnum((unsigned char)start[-1])) continue; /* GH200 is not H200 */
        while (*m && *n) {
            if (!isalnum((unsigned char)*m))
                m++;
            else if (!isalnum((unsigned char)*n))
                n++;
            else if (tolower((unsigned char)*m) != tolower((unsigned char)*n))
                break;
            else
                m++, n++;
        }
        if (!*m && !isalnum((unsigned char)*n)) return true;
    }
    return false;
}

/* The name of an entry without its memory: "A100" of "A100-40GB". */
static void model_of(const struct hapt_device_spec *spec, char model[sizeof spec->name])
{
    snprintf(model, sizeof spec->name, "%.*s", (int)sizeof spec->name - 1, spec->name);
    char *dash = strrchr(model, '-');
    if (dash && strstr(dash, "GB")) *dash = '\0';
}

/* A memory size in the model name is checked against memory_bytes. Drivers reserve up to a tenth of the memory. */
const struct hapt_device_spec *hapt_device_spec_of_name(const char *name, double memory_bytes)
{
    const struct hapt_device_spec *found = NULL;
    if (strstr(name, "PCIe") && strstr(name, "H100")) return NULL; /* see pci_ids */
    for (int i = 0; i < DATABASE_COUNT; i++) {
        const struct hapt_device_spec *spec = &database[i].spec;
        char model[sizeof spec->name];
        model_of(spec, model);
        const bool fits = memory_bytes > 0.88 * spec->memory_bytes && memory_bytes < 1.1 * spec->memory_bytes;
        if (strcmp(spec->backend, "cuda") != 0 || !fits || !names_model(name, model)) continue;
        if (found) return NULL;
        found = spec;
    }
    return found;
}

/* "80gb" or "80g" in a word, in bytes; 0: it names no memory. */
static double memory_in(const char *word)
{
    for (const char *c = word; *c; c++) {
        if (!isdigit((unsigned char)*c) || (c > word && isdigit((unsigned char)c[-1]))) continue;
        char *end;
        const double number = strtod(c, &end);
        if (tolower((unsigned char)*end) == 'g' && (!end[1] || tolower((unsigned char)end[1]) == 'b' || end[1] == '_'))
            return number * GB;
    }
    return 0;
}

const struct hapt_device_spec *hapt_device_spec_of_word(const char *word, bool *several)
{
    const struct hapt_device_spec *found = NULL;
    const double memory = memory_in(word);
    char short_form[80];
    snprintf(short_form, sizeof short_form, "rtx %.70s", word);
    *several = false;
    if (strcasestr(word, "pcie") && strcasestr(word, "h100")) return NULL; /* see pci_ids */
    for (int i = 0; i < DATABASE_COUNT; i++) {
        const struct hapt_device_spec *spec = &database[i].spec;
        char model[sizeof spec->name];
        model_of(spec, model);
        if (strcmp(spec->backend, "cpu") == 0 || (!names_model(word, model) && !names_model(short_form, model)))
            continue;
        if (memory > 0 && (memory < 0.88 * spec->memory_bytes || memory > 1.1 * spec->memory_bytes)) continue;
        *several |= found != NULL;
        if (!found || spec->memory_bytes < found->memory_bytes) found = spec;
    }
    return found;
}

/* Letters and digits in lower case. */
static void simplify(const char *name, char simple[64])
{
    size_t length = 0;
    for (; *name && length < 63; name++)
        if (isalnum((unsigned char)*name)) simple[length++] = (char)tolower((unsigned char)*name);
    simple[length] = '\0';
}

/* Share of the pairs of neighbouring characters that two names have in common (Dice's coefficient). */
static double likeness(const char *a, const char *b)
{
    const size_t pairs_a = strlen(a) > 1 ? strlen(a) - 1 : 0, pairs_b = strlen(b) > 1 ? strlen(b) - 1 : 0;
    size_t common = 0;
    for (size_t i = 0; i < pairs_b; i++) {
        const char pair[3] = {b[i], b[i + 1], '\0'};
        common += strstr(a, pair) != NULL;
    }
    return pairs_a + pairs_b > 0 ? 2.0 * (double)common / (double)(pairs_a + pairs_b) : 0;
}

const char *hapt_device_nearest(const char *name)
{
    char given[64], other[64];
    int best = 0;
    double most = -1;
    simplify(name, given);
    for (int i = 0; i < DATABASE_COUNT; i++) {
        simplify(database[i].spec.name, other);
        const double like = likeness(given, other);
        if (like > most) {
            most = like;
            best = i;
        }
    }
    return database[best].spec.name;
}
