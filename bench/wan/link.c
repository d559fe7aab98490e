/* A wide-area link between two network namespaces: rate, delay, queue, random loss.
 *
 *     link run RATE_BYTES_PER_S DELAY_S QUEUE_BYTES LOSS SEED SECONDS_MAX
 *     link enter /proc/PID/fd/N COMMAND...
 *
 * `run` makes two namespaces, hub (10.77.0.1) and site (10.77.0.2), joined by a pair of TUN
 * devices, prints the paths of both on one line, carries packets until standard input closes (or
 * SECONDS_MAX have passed) and prints what it counted. The namespaces have no names: the kernel
 * removes them with their last process. `enter` runs a command in one of them.
 *
 * Each way, a packet waits in a first-in-first-out queue of QUEUE_BYTES in front of a transmitter
 * of RATE_BYTES_PER_S (bytes of IP packets), then travels DELAY_S. Loss is drawn per segment.
 * The devices hand over large TCP packets unsegmented, as network cards do; one that loses a
 * segment is cut around it here, so that loss is per segment of the wire all the same. Without
 * that, a gigabit would need two cores for itself.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MTU 1500
/* The largest packet that a device hands over: 64 KiB with its headers. */
#define PACKET_MAX (65536 + sizeof(struct virtio_net_hdr))
/* Packets read before those that are due are sent on. */
#define READS_MAX 32
/* Packets that may wait to be read from a device (the default of 500 loses bursts of ACKs). */
#define DEVICE_QUEUE 20000

typedef struct virtio_net_hdr Offload; /* stands before every packet */

/* A packet under way; its bytes follow. */
typedef struct {
    uint64_t due_ns;
    uint32_t size; /* 0: the rest of the ring is unused, go on at its start */
    uint32_t span;
} Slot;

/* One direction. Only its own thread touches it until the threads have ended. */
typedef struct {
    int in, out;
    double rate, delay_s, queue_bytes, loss;
    uint64_t random, segments_to_loss, free_ns;
    uint8_t *ring;
    size_t ring_bytes, head, tail, used;
    uint64_t packets, segments, bytes, lost, queue_full, ring_full, unsent;
} Way;

static volatile int ending;

static void die(const char *what) {
    fprintf(stderr, "link: %s: %s\n", what, strerror(errno));
    exit(77);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* xorshift64*: uniform in (0, 1]. */
static double uniform(Way *way) {
    way->random ^= way->random >> 12;
    way->random ^= way->random << 25;
    way->random ^= way->random >> 27;
    return (double)((way->random * 2685821657736338717u >> 11) + 1) / 9007199254740992.0;
}

/* Segments that pass before the next is lost: geometric. */
static void draw_loss(Way *way) {
    way->segments_to_loss =
        way->loss > 0 ? (uint64_t)(log(uniform(way)) / log1p(-way->loss)) : UINT64_MAX;
}

/* --- packets -------------------------------------------------------------------------------- */

static uint32_t sum16(const uint8_t *bytes, size_t size, uint32_t sum) {
    for (size_t i = 0; i + 1 < size; i += 2) sum += (uint32_t)(bytes[i] << 8 | bytes[i + 1]);
    return sum;
}

static uint16_t folded(uint32_t sum) {
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

static void put16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

/* Bytes of IP and TCP headers of an unsegmented TCP packet, 0 for any other. */
static size_t tcp_headers(const uint8_t *packet, size_t size) {
    const Offload *offload = (const void *)packet;
    const uint8_t *ip = packet + sizeof *offload;
    if ((offload->gso_type & ~VIRTIO_NET_HDR_GSO_ECN) != VIRTIO_NET_HDR_GSO_TCPV4) return 0;
    if (offload->gso_size == 0 || size < sizeof *offload + 40) return 0;
    size_t ip_bytes = (size_t)(ip[0] & 15) * 4;
    return ip_bytes + (size_t)(ip[ip_bytes + 12] >> 4) * 4;
}

/* Write segments [first, end) of `packet` to `piece`; return its size. */
static size_t cut(const uint8_t *packet, size_t size, size_t headers, size_t first, size_t end,
                  uint8_t *piece) {
    Offload offload;
    memcpy(&offload, packet, sizeof offload);
    const size_t mss = offload.gso_size, before = sizeof offload + headers;
    const size_t payload = size - before, from = first * mss;
    const size_t to = end * mss < payload ? end * mss : payload;
    const size_t part = to - from;
    uint8_t *ip = piece + sizeof offload;
    memcpy(ip, packet + sizeof offload, headers);
    memcpy(ip + headers, packet + before + from, part);
    if (part <= mss) {
        offload.gso_type = VIRTIO_NET_HDR_GSO_NONE;
        offload.gso_size = 0;
    }
    memcpy(piece, &offload, sizeof offload);
    const size_t ip_bytes = (size_t)(ip[0] & 15) * 4;
    uint8_t *tcp = ip + ip_bytes;
    put16(ip + 2, (uint16_t)(headers + part));
    put16(ip + 4, (uint16_t)((ip[4] << 8 | ip[5]) + first));
    put16(ip + 10, 0);
    put16(ip + 10, (uint16_t)~folded(sum16(ip, ip_bytes, 0)));
    uint32_t seq;
    memcpy(&seq, tcp + 4, 4);
    seq = htonl(ntohl(seq) + (uint32_t)from);
    memcpy(tcp + 4, &seq, 4);
    if (to < payload) tcp[13] &= (uint8_t)~0x09; /* FIN and PSH stand on the last */
    if (from > 0) tcp[13] &= (uint8_t)~0x80;     /* CWR on the first */
    /* The receiver completes the checksum from that of the pseudo-header. */
    put16(tcp + 16, folded(sum16(ip + 12, 8, (uint32_t)(6 + headers - ip_bytes + part))));
    return sizeof offload + headers + part;
}

/* --- one way -------------------------------------------------------------------------------- */

/* Bytes of the queue that are free. */
static double room(const Way *way, uint64_t now) {
    const double waiting = way->free_ns > now ? (double)(way->free_ns - now) * way->rate / 1e9 : 0;
    return way->queue_bytes - waiting;
}

/* Through the queue, the transmitter and the delay. */
static void transmit(Way *way, const uint8_t *packet, size_t size, size_t wire_bytes) {
    const uint64_t now = now_ns();
    const uint64_t starts = way->free_ns > now ? way->free_ns : now;
    const size_t span = (sizeof(Slot) + size + 7) & ~(size_t)7;
    const size_t skip = way->head + span > way->ring_bytes ? way->ring_bytes - way->head : 0;
    if (way->used + skip + span > way->ring_bytes) {
        way->ring_full++;
        return;
    }
    if (skip >= sizeof(Slot)) {
        Slot *filler = (void *)(way->ring + way->head);
        *filler = (Slot){0, 0, (uint32_t)skip};
    }
    if (skip) {
        way->used += skip;
        way->head = 0;
    }
    way->free_ns = starts + (uint64_t)((double)wire_bytes * 1e9 / way->rate);
    Slot *slot = (void *)(way->ring + way->head);
    *slot = (Slot){way->free_ns + (uint64_t)(way->delay_s * 1e9), (uint32_t)size, (uint32_t)span};
    memcpy(slot + 1, packet, size);
    way->head = (way->head + span) % way->ring_bytes;
    way->used += span;
    way->packets++;
    way->bytes += wire_bytes;
}

/* Segments [first, end) of a packet, as many as the queue has room for; `headers` is 0 for a
 * packet that is one segment. */
static void enqueue(Way *way, const uint8_t *packet, size_t size, size_t headers, size_t first,
                    size_t end) {
    static __thread uint8_t piece[PACKET_MAX] __attribute__((aligned(8)));
    const double free_bytes = room(way, now_ns());
    const size_t whole = size - sizeof(Offload);
    const size_t each = headers ? ((const Offload *)(const void *)packet)->gso_size + headers : whole;
    size_t fits = free_bytes > 0 ? (size_t)(free_bytes / (double)each) : 0;
    if (fits > end - first) fits = end - first;
    way->queue_full += end - first - fits;
    if (fits == 0) return;
    if (!headers) {
        transmit(way, packet, size, whole);
        return;
    }
    const size_t count = cut(packet, size, headers, first, first + fits, piece);
    transmit(way, piece, count, count - sizeof(Offload) + (fits - 1) * headers);
}

static void accept_packet(Way *way, const uint8_t *packet, size_t size) {
    const Offload *offload = (const void *)packet;
    const size_t headers = tcp_headers(packet, size);
    const size_t payload = size - sizeof *offload - headers;
    const size_t count = headers ? (payload + offload->gso_size - 1) / offload->gso_size : 1;
    way->segments += count;
    size_t first = 0;
    while (way->segments_to_loss < count - first) {
        const size_t lost = first + way->segments_to_loss;
        if (lost > first) enqueue(way, packet, size, headers, first, lost);
        first = lost + 1;
        way->lost++;
        draw_loss(way);
    }
    way->segments_to_loss -= count - first;
    if (count > first) enqueue(way, packet, size, headers, first, count);
}

/* Hand over what has arrived; nanoseconds until the next does, or a tenth of a second. */
static uint64_t deliver(Way *way) {
    while (way->used) {
        const size_t rest = way->ring_bytes - way->tail;
        Slot *slot = (void *)(way->ring + way->tail);
        if (rest < sizeof(Slot)) { /* too short for a filler */
            way->used -= rest;
            way->tail = 0;
            continue;
        }
        if (slot->size) {
            const uint64_t now = now_ns();
            if (slot->due_ns > now) return slot->due_ns - now;
            if (write(way->out, slot + 1, slot->size) < 0) way->unsent++;
        }
        way->tail = (way->tail + slot->span) % way->ring_bytes;
        way->used -= slot->span;
    }
    return 100000000;
}

static void *carry(void *argument) {
    Way *way = argument;
    static __thread uint8_t packet[PACKET_MAX] __attribute__((aligned(8)));
    prctl(PR_SET_TIMERSLACK, 1);
    while (!ending) {
        const uint64_t wait = deliver(way);
        struct timespec timeout = {0, (long)(wait < 100000000 ? wait : 100000000 - 1)};
        struct pollfd readable = {way->in, POLLIN, 0};
        if (ppoll(&readable, 1, &timeout, NULL) <= 0) continue;
        for (int i = 0; i < READS_MAX; i++) {
            const ssize_t size = read(way->in, packet, sizeof packet);
            if (size <= (ssize_t)sizeof(Offload)) break;
            accept_packet(way, packet, (size_t)size);
        }
    }
    return NULL;
}

/* --- namespaces ----------------------------------------------------------------------------- */

static void set_address(int control, struct ifreq *request, unsigned long call, const char *text) {
    struct sockaddr_in *address = (void *)&request->ifr_addr;
    memset(address, 0, sizeof *address);
    address->sin_family = AF_INET;
    inet_pton(AF_INET, text, &address->sin_addr);
    if (ioctl(control, call, request) < 0) die("cannot set an address");
}

static void bring_up(int control, struct ifreq *request) {
    request->ifr_flags = IFF_UP | IFF_RUNNING;
    if (ioctl(control, SIOCSIFFLAGS, request) < 0) die("cannot bring a device up");
}

/* Move into a new namespace with one TUN device; return the device, and the namespace's file. */
static int new_namespace(const char *address, int *namespace) {
    if (unshare(CLONE_NEWNET) < 0) die("cannot make a network namespace (root is needed)");
    *namespace = open("/proc/thread-self/ns/net", O_RDONLY);
    const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (*namespace < 0 || device < 0) die("cannot open /dev/net/tun");
    struct ifreq request = {0};
    strcpy(request.ifr_name, "wan");
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(device, TUNSETIFF, &request) < 0) die("cannot make a TUN device");
    if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) die("TUN without offload");
    const int control = socket(AF_INET, SOCK_DGRAM, 0);
    request.ifr_mtu = MTU;
    if (ioctl(control, SIOCSIFMTU, &request) < 0) die("cannot set the MTU");
    request.ifr_qlen = DEVICE_QUEUE;
    if (ioctl(control, SIOCSIFTXQLEN, &request) < 0) die("cannot set the device's queue");
    set_address(control, &request, SIOCSIFADDR, address);
    set_address(control, &request, SIOCSIFNETMASK, "255.255.255.0");
    bring_up(control, &request);
    strcpy(request.ifr_name, "lo");
    bring_up(control, &request);
    close(control);
    return device;
}

static void count(const Way *way, const char *name, const char *after) {
    printf("\"%s\": {\"packets\": %llu, \"segments\": %llu, \"bytes\": %llu, \"lost\": %llu, "
           "\"queue_full\": %llu, \"ring_full\": %llu, \"unsent\": %llu}%s",
           name, (unsigned long long)way->packets, (unsigned long long)way->segments,
           (unsigned long long)way->bytes, (unsigned long long)way->lost,
           (unsigned long long)way->queue_full, (unsigned long long)way->ring_full,
           (unsigned long long)way->unsent, after);
}

static int run(char **arguments) {
    Way ways[2] = {0};
    int namespaces[2];
    const int hub = new_namespace("10.77.0.1", &namespaces[0]);
    const int site = new_namespace("10.77.0.2", &namespaces[1]);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        Way *way = &ways[i];
        way->in = i ? hub : site; /* 0: up, from the site; 1: down */
        way->out = i ? site : hub;
        way->rate = atof(arguments[0]);
        way->delay_s = atof(arguments[1]);
        way->queue_bytes = atof(arguments[2]);
        way->loss = atof(arguments[3]);
        way->random = (uint64_t)atoll(arguments[4]) * 2 + 1 + (uint64_t)i * 0x9e3779b97f4a7c15u;
        for (int warm = 0; warm < 16; warm++) uniform(way);
        draw_loss(way);
        /* All that may wait or travel, twice for the slots of small packets. */
        way->ring_bytes =
            ((size_t)(2 * (way->queue_bytes + way->rate * way->delay_s)) + (1 << 20)) & ~(size_t)7;
        way->ring = malloc(way->ring_bytes);
        if (!way->ring) die("no memory for the packets under way");
    }
    printf("/proc/%d/fd/%d /proc/%d/fd/%d\n", getpid(), namespaces[0], getpid(), namespaces[1]);
    fflush(stdout);
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, carry, &ways[i]);
    struct pollfd owner = {0, POLLIN, 0};
    poll(&owner, 1, (int)(1000 * atof(arguments[5])));
    ending = 1;
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    printf("{");
    count(&ways[0], "up", ", ");
    count(&ways[1], "down", "}\n");
    return 0;
}

int main(int count, char **arguments) {
    if (count == 8 && !strcmp(arguments[1], "run")) return run(arguments + 2);
    if (count > 3 && !strcmp(arguments[1], "enter")) {
        const int namespace = open(arguments[2], O_RDONLY | O_CLOEXEC);
        if (namespace < 0 || setns(namespace, CLONE_NEWNET) < 0) die("cannot enter the namespace");
        execvp(arguments[3], arguments + 3);
        die(arguments[3]);
    }
    fprintf(stderr, "see the head of link.c\n");
    return 2;
}
