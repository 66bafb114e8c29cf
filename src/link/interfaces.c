/* Lists this host's network interfaces and finds pairs on one network. */
#include <ifaddrs.h>
#include <math.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/network.h"

static int bits_of(const unsigned char *mask, int bytes)
{
    int bits = 0;
    for (int i = 0; i < bytes; i++) bits += __builtin_popcount(mask[i]);
    return bits;
}

/* The driver's speed in Mbit/s, returned in byte/s; virtual interfaces have none, or -1. */
static double claimed_bandwidth(const char *name)
{
    char path[64], mbits[32];
    snprintf(path, sizeof path, "/sys/class/net/%.16s/speed", name);
    return hapt_first_line(path, mbits, sizeof mbits) ? fmax(atof(mbits), 0) * 125e3 : 0;
}

static bool read_address(const struct ifaddrs *from, struct hapt_interface *to)
{
    if (!from->ifa_addr || !from->ifa_netmask) return false;
    if (from->ifa_addr->sa_family == AF_INET) {
        const struct sockaddr_in *address = (const void *)from->ifa_addr, *mask = (const void *)from->ifa_netmask;
        memcpy(to->address, &address->sin_addr, 4);
        to->prefix = bits_of((const void *)&mask->sin_addr, 4);
        return true;
    }
    if (from->ifa_addr->sa_family != AF_INET6) return false;
    const struct sockaddr_in6 *address = (const void *)from->ifa_addr, *mask = (const void *)from->ifa_netmask;
    if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) return false; /* link-local: valid only on its own wire */
    memcpy(to->address, &address->sin6_addr, 16);
    to->prefix = bits_of((const void *)&mask->sin6_addr, 16);
    to->is_ipv6 = true;
    return true;
}

void hapt_interfaces_list(bool loopback, struct hapt_interfaces *list)
{
    struct ifaddrs *all;
    *list = (struct hapt_interfaces){0};
    if (getifaddrs(&all)) return;
    for (const struct ifaddrs *at = all; at && list->count < HAPT_INTERFACES; at = at->ifa_next) {
        struct hapt_interface found = {0};
        if (!(at->ifa_flags & IFF_UP) || !(at->ifa_flags & IFF_RUNNING)) continue;
        if (at->ifa_flags & IFF_LOOPBACK && !loopback) continue;
        if (!read_address(at, &found)) continue;
        snprintf(found.name, sizeof found.name, "%s", at->ifa_name);
        found.bandwidth = claimed_bandwidth(found.name);
        list->item[list->count++] = found;
    }
    freeifaddrs(all);
}

bool hapt_interfaces_share_network(const struct hapt_interface *a, const struct hapt_interface *b)
{
    if (a->is_ipv6 != b->is_ipv6 || a->prefix != b->prefix) return false;
    for (int bit = 0; bit < a->prefix; bit++)
        if ((a->address[bit / 8] ^ b->address[bit / 8]) >> (7 - bit % 8) & 1) return false;
    return true;
}
