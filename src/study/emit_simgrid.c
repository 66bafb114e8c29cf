/*
 * Time-independent traces of SimGrid's SMPI: a line is a rank, an action and its numbers. SimGrid 3.32 and later read
 * them (smpi_replay in its manual).
 *
 * The links of the platform serve messages in turn: maxmin/concurrency-limit is 1. Trainer and simulator do the same.
 * At SimGrid's default, messages that wait on a link share it instead.
 */
#include "emit.h"

#include <math.h>

static const double FLOPS = 1e9; /* of each host: a flop is a nanosecond */

/* Largest message: MPI counts its bytes in an int. */
static const double MOST_BYTES = 1 << 30;

/* The port over which messages of a submesh go to another; -1: the link of the two. */
static int port_between(const struct emit_step *step, int from, int to)
{
    for (int c = 0; c < step->channel_count; c++)
        if (step->channel[c].from == from && step->channel[c].to == to && step->channel[c].port >= 0)
            return step->channel[c].port;
    return -1;
}

/* Do the messages of a channel go over the same link as those from one submesh to another? */
static bool same_link(const struct emit_step *step, const struct emit_channel *channel, int from, int to)
{
    if (channel->from < 0) return false;
    const int port = port_between(step, from, to), its = port_between(step, channel->from, channel->to);
    if (port >= 0 || its >= 0) return port == its;
    return (channel->from == from && channel->to == to) || (channel->from == to && channel->to == from);
}

/* Bandwidth of the link from one submesh to another: that of its first channel, or less if a message would be too
 * large. 0: no channel joins them. */
static double bandwidth_between(const struct emit_step *step, int from, int to)
{
    double bandwidth = 0, longest_s = 0;
    for (int c = 0; c < step->channel_count; c++) {
        const struct emit_channel *channel = &step->channel[c];
        if (!same_link(step, channel, from, to)) continue;
        longest_s = fmax(longest_s, channel->cost_s);
        if (bandwidth > 0) continue;
        const bool known = channel->cost_s > 0 && channel->bytes >= 0.5;
        bandwidth = known ? round(channel->bytes) / channel->cost_s : HAPT_EMIT_BANDWIDTH_BYTES_PER_S;
    }
    return longest_s * bandwidth > MOST_BYTES ? MOST_BYTES / longest_s : bandwidth;
}

/* trace->state: double [channel_count], the bytes of a message. Messages of one link may have other rates in the plan,
 * so the time counts. */
static enum hapt_status begin(struct emit_trace *trace, struct hapt_arena *arena)
{
    const struct emit_step *step = trace->step;
    double *size_bytes;
    HAPT_NEW(size_bytes, arena, step->channel_count);
    for (int c = 0; c < step->channel_count; c++) {
        const struct emit_channel *channel = &step->channel[c];
        if (channel->from == trace->submesh || channel->to == trace->submesh)
            size_bytes[c] = round(channel->cost_s * bandwidth_between(step, channel->from, channel->to));
    }
    trace->state = size_bytes;
    fprintf(trace->file, "%d init\n", trace->submesh);
    return HAPT_OK;
}

static void compute(struct emit_trace *trace, const char *name, const struct hapt_instruction *at, double time_s)
{
    (void)name, (void)at;
    fprintf(trace->file, "%d compute %.17g\n", trace->submesh, time_s * FLOPS);
}

static void post(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    (void)at;
    fprintf(trace->file, "%d irecv %d %d %.17g\n", trace->submesh, channel->from, channel->tag,
            ((const double *)trace->state)[channel->index]);
}

/* Requests of one sender, receiver and tag are waited for in order. */
static void wait(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    (void)at;
    fprintf(trace->file, "%d wait %d %d %d\n", trace->submesh, channel->from, channel->to, channel->tag);
}

static void send(struct emit_trace *trace, const struct emit_channel *channel, int at)
{
    (void)at;
    fprintf(trace->file, "%d isend %d %d %.17g\n", trace->submesh, channel->to, channel->tag,
            ((const double *)trace->state)[channel->index]);
}

static void end(struct emit_trace *trace)
{
    fprintf(trace->file, "%d finalize\n", trace->submesh);
}

/* Does the link of two submeshes carry messages in this direction? Not if a port of the sender does. */
static bool joins(const struct emit_step *step, int from, int to)
{
    return port_between(step, from, to) < 0 && bandwidth_between(step, from, to) > 0;
}

static void write_link(const struct emit_step *step, int a, int b, FILE *file)
{
    const bool there = joins(step, a, b), back = joins(step, b, a);
    if (there || back)
        fprintf(file,
                "    <link id=\"link%d-%d\" bandwidth=\"%.17gBps\" latency=\"0s\" "
                "sharing_policy=\"SPLITDUPLEX\"/>\n",
                a, b, there ? bandwidth_between(step, a, b) : bandwidth_between(step, b, a));
}

/* Links of a submesh that lead to several others, one direction each. */
static void write_ports(const struct emit_step *step, FILE *file)
{
    for (int c = 0; c < step->channel_count; c++) {
        const struct emit_channel *channel = &step->channel[c];
        bool first = channel->from >= 0 && channel->port >= 0;
        for (int before = 0; before < c; before++)
            first = first && !(step->channel[before].from >= 0 && step->channel[before].port == channel->port);
        if (first)
            fprintf(file, "    <link id=\"port%d\" bandwidth=\"%.17gBps\" latency=\"0s\" sharing_policy=\"SHARED\"/>\n",
                    channel->port, bandwidth_between(step, channel->from, channel->to));
    }
}

/* The route from one submesh to another: over the port of the sender, or the link of submeshes a < b. */
static void write_route(const struct emit_step *step, int from, int to, FILE *file)
{
    const int port = port_between(step, from, to), a = from < to ? from : to, b = from < to ? to : from;
    fprintf(file, "    <route src=\"submesh%d\" dst=\"submesh%d\" symmetrical=\"NO\"><link_ctn id=\"", from, to);
    if (port >= 0)
        fprintf(file, "port%d\"/></route>\n", port);
    else
        fprintf(file, "link%d-%d\" direction=\"%s\"/></route>\n", a, b, from == a ? "UP" : "DOWN");
}

static void write_platform(const struct emit_step *step, FILE *file)
{
    const int submeshes = step->schedule->submesh_count;
    fprintf(file,
            "<?xml version='1.0'?>\n<!DOCTYPE platform SYSTEM \"https://simgrid.org/simgrid.dtd\">\n"
            "<!-- A host is a submesh; a flop is a nanosecond of its computing. A link moves a message in the time "
            "of the plan. -->\n<platform version=\"4.1\">\n  <zone id=\"plan\" routing=\"Full\">\n");
    for (int s = 0; s < submeshes; s++) fprintf(file, "    <host id=\"submesh%d\" speed=\"%.17gf\"/>\n", s, FLOPS);
    for (int a = 0; a < submeshes; a++)
        for (int b = a + 1; b < submeshes; b++) write_link(step, a, b, file);
    write_ports(step, file);
    for (int a = 0; a < submeshes; a++)
        for (int b = a + 1; b < submeshes; b++) {
            const bool there = bandwidth_between(step, a, b) > 0, back = bandwidth_between(step, b, a) > 0;
            if (there) write_route(step, a, b, file);
            if (back) write_route(step, b, a, file);
        }
    fprintf(file, "  </zone>\n</platform>\n");
}

static void write_hosts(const struct emit_step *step, FILE *file)
{
    for (int s = 0; s < step->schedule->submesh_count; s++) fprintf(file, "submesh%d\n", s);
}

static void write_list(const struct emit_step *step, FILE *file)
{
    for (int s = 0; s < step->schedule->submesh_count; s++) fprintf(file, "rank.%d.txt\n", s);
}

static void write_script(const struct emit_step *step, FILE *file)
{
    fprintf(file,
            "#!/bin/sh\n"
            "# Replays the step with SimGrid (Debian: libsimgrid-dev): sh replay.sh [OPTION OF SMPIRUN]...\n"
            "# Every message is a rendezvous, so that it waits for a transfer slot of the receiver. Links serve one "
            "message "
            "at a time;\n"
            "# --cfg=maxmin/concurrency-limit:-1 lets messages share a link, SimGrid's default.\n"
            "cd \"$(dirname \"$0\")\" || exit 1\n"
            "exec smpirun -np %d -platform platform.xml -hostfile hosts.txt -replay traces.txt "
            "--cfg=network/model:CM02 \\\n"
            "    --cfg=network/latency-factor:1 --cfg=network/bandwidth-factor:1 --cfg=network/TCP-gamma:1e12 \\\n"
            "    --cfg=network/crosstraffic:0 --cfg=smpi/send-is-detached-thresh:0 --cfg=smpi/async-small-thresh:0 \\\n"
            "    --cfg=smpi/host-speed:%.17gf --cfg=maxmin/concurrency-limit:1 \"$@\"\n",
            step->schedule->submesh_count, FLOPS);
}

static const struct emit_file files[] = {{"platform.xml", write_platform},
                                         {"hosts.txt", write_hosts},
                                         {"traces.txt", write_list},
                                         {"replay.sh", write_script},
                                         {NULL, NULL}};

const struct emit_functions emit_simgrid = {.file_name = "rank.%d.txt",
                                            .waits_at_end = true,
                                            .begin = begin,
                                            .compute = compute,
                                            .post = post,
                                            .receive = wait,
                                            .send = send,
                                            .sent = wait,
                                            .end = end,
                                            .file = files};
