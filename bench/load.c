/* Load client for token streams: Server-Sent Events over HTTP/1.1, one thread, epoll. One JSON line at the end.
 *
 *   live    hold --conns readers for --warm + --window seconds; count frames, check their ids, take latencies
 *   idle    the same on silent streams: what a reader costs the server in memory
 *   replay  --conns slots: connect, request, read --expect frames, close, again
 *   resume  replay of one frame with --pause-us between: connect to first frame
 *   start   --bursts bursts of --conns simultaneous requests: time to the first byte and the first frame
 *
 * With --messages each connection is a WebSocket: it says one line of that file, and then counts records.
 *
 * A frame is one `id:` line (--count data: one `data:` line, for servers without ids). Ids must be consecutive on each
 * connection; every one that is not is a gap. A latency is "now" minus the 16 digits after the first '@' of a data line,
 * microseconds of CLOCK_MONOTONIC, which every process of the machine shares. */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "accounts.h"

enum mode { LIVE, IDLE, REPLAY, RESUME, START };
static const char *const MODE_NAMES[] = {"live", "idle", "replay", "resume", "start", NULL};
enum state { CLOSED, CONNECTING, HEAD, BODY };
enum chunk_part { SIZE, EXTENSION, DATA, DATA_END, TRAILER };

struct conn {
    int fd, index;
    enum state state;
    uint64_t opened_at, first_byte_at, first_frame_at, reopen_at;
    long frames;
    int64_t last_id; /* -1: nothing seen, any id may come */
    int chunked;
    enum chunk_part part;
    uint64_t chunk_left;
    char head[4096];
    size_t head_len;
    char *kept; /* the beginning of a WebSocket frame that a read cut in two */
    size_t kept_len;
    char line[256]; /* the start of a line that a read cut in two; the rest of a longer one is not looked at */
    size_t line_len;
};

struct lines {
    char **items;
    int count;
};

static struct {
    enum mode mode;
    int port, conns, bursts, count_data;
    long expect, pause_us, first;
    double warm, window;
    struct lines paths, bodies, messages;
    pid_t pids[16];
    int pid_count;
} opt = {.conns = 1, .bursts = 10, .warm = 1, .window = 4, .first = -1};

static struct conn *conns;
static int poller, opened, answered, unfinished, measuring;
static uint64_t frames, gaps, errors, closed, bytes_read, reads, replays, window_from, window_to;
static struct samples latency, first_byte, first_frame, whole, burst_byte, burst_frame;
static char bad_status[16];

static void fail(struct conn *c) {
    errors++;
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    if (c->state != BODY) answered++; /* a refused one must not hold up the ramp */
    c->state = CLOSED;
    unfinished--;
}

static void send_request(struct conn *c) {
    char text[16384];
    const char *path = opt.paths.items[c->index % opt.paths.count];
    int n;
    if (opt.messages.count) {
        n = snprintf(text, sizeof text,
                     "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                     "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n",
                     path, opt.port);
    } else if (opt.bodies.count) {
        const char *body = opt.bodies.items[c->index % opt.bodies.count];
        n = snprintf(text, sizeof text,
                     "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: text/event-stream\r\n"
                     "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                     path, opt.port, strlen(body), body);
    } else {
        n = snprintf(text, sizeof text, "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: text/event-stream\r\n\r\n", path,
                     opt.port);
    }
    /* A fresh socket's buffer takes any request of this size whole. */
    if (n >= (int)sizeof text || send(c->fd, text, (size_t)n, MSG_NOSIGNAL) != n) fail(c);
    else c->state = HEAD;
}

static void open_conn(struct conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int index = c->index, one = 1;
    free(c->kept);
    memset(c, 0, sizeof *c);
    c->index = index;
    c->last_id = opt.first - 1 < -1 ? -1 : opt.first - 1;
    c->state = CONNECTING;
    c->opened_at = now_us();
    unfinished++;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) { fail(c); return; }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS) { fail(c); return; }
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
}

static void on_id(struct conn *c, const char *p, size_t n, uint64_t now) {
    int64_t id = 0;
    for (size_t i = 0; i < n && p[i] >= '0' && p[i] <= '9'; i++) id = id * 10 + (p[i] - '0');
    if (c->last_id >= 0 && id != c->last_id + 1) gaps++;
    c->last_id = id;
    if (!c->frames++) c->first_frame_at = now;
    if (measuring) frames++;
}

static void on_data(struct conn *c, const char *p, size_t n, uint64_t now) {
    if (opt.count_data) {
        if (!c->frames++) c->first_frame_at = now;
        if (measuring) frames++;
    }
    const char *at = measuring && opt.mode == LIVE ? memchr(p, '@', n < 256 ? n : 256) : NULL;
    if (!at || (size_t)(p + n - at) < 17) return;
    uint64_t sent = 0;
    for (int i = 1; i <= 16; i++) sent = sent * 10 + (uint64_t)(at[i] - '0');
    add(&latency, now > sent ? now - sent : 0);
}

static void on_line(struct conn *c, const char *p, size_t n, uint64_t now) {
    if (n > 4 && p[0] == 'i' && !memcmp(p, "id: ", 4)) {
        if (!opt.count_data) on_id(c, p + 4, n - 4, now);
    } else if (n > 6 && p[0] == 'd' && !memcmp(p, "data: ", 6)) {
        on_data(c, p + 6, n - 6, now);
    }
}

static void on_text(struct conn *c, const char *p, size_t n, uint64_t now) {
    while (n) {
        const char *end = memchr(p, '\n', n);
        size_t length = end ? (size_t)(end - p) : n;
        if (!end || c->line_len) {
            size_t room = sizeof c->line - c->line_len, take = length < room ? length : room;
            memcpy(c->line + c->line_len, p, take);
            c->line_len += take;
        }
        if (!end) return;
        if (c->line_len) on_line(c, c->line, c->line_len, now);
        else on_line(c, p, length, now);
        c->line_len = 0;
        p = end + 1;
        n -= length + 1;
    }
}

/* A text message, masked with zeros (RFC 6455, section 5.3, allows any key). */
static void say(struct conn *c) {
    const char *message = opt.messages.items[c->index % opt.messages.count];
    char frame[8 + 8192];
    size_t n = strlen(message), head = 0;
    frame[head++] = (char)0x81;
    if (n < 126) {
        frame[head++] = (char)(0x80 | n);
    } else {
        frame[head++] = (char)(0x80 | 126);
        frame[head++] = (char)(n >> 8);
        frame[head++] = (char)n;
    }
    memset(frame + head, 0, 4);
    memcpy(frame + head + 4, message, n);
    if (send(c->fd, frame, head + 4 + n, MSG_NOSIGNAL) != (ssize_t)(head + 4 + n)) fail(c);
}

/* One text message: a record, or an array of them, each with its seq first in its data. */
static void on_message(struct conn *c, const char *p, size_t n, uint64_t now) {
    static const char SEQ[] = "\"data\":{\"seq\":";
    for (const char *end = p + n, *at; (at = memmem(p, (size_t)(end - p), SEQ, sizeof SEQ - 1)); p = at) {
        at += sizeof SEQ - 1;
        on_id(c, at, (size_t)(end - at), now);
        on_data(c, at, (size_t)(end - at), now);
    }
}

/* Frames of the server's: whole, unmasked text messages.  One that a read has cut is put together in `kept`. */
static void on_frames(struct conn *c, const char *p, size_t n, uint64_t now) {
    if (c->kept_len) {
        c->kept = realloc(c->kept, c->kept_len + n);
        memcpy(c->kept + c->kept_len, p, n);
        p = c->kept;
        n += c->kept_len;
    }
    const unsigned char *u = (const unsigned char *)p;
    while (n >= 2) {
        size_t head = u[1] < 126 ? 2 : u[1] == 126 ? 4 : 10, length = u[1];
        if (n < head) break;
        if (head > 2) {
            length = 0;
            for (size_t i = 2; i < head; i++) length = length << 8 | u[i];
        }
        if (n < head + length) break;
        if ((u[0] & 15) == 1) on_message(c, (const char *)u + head, length, now);
        u += head + length;
        n -= head + length;
    }
    char *rest = n ? malloc(n) : NULL;
    if (n) memcpy(rest, u, n);
    free(c->kept);
    c->kept = rest;
    c->kept_len = n;
}

static void on_body(struct conn *c, const char *p, size_t n, uint64_t now) {
    if (opt.messages.count) { on_frames(c, p, n, now); return; }
    if (!c->chunked) { on_text(c, p, n, now); return; }
    while (n) {
        if (c->part == DATA) {
            size_t take = c->chunk_left < n ? (size_t)c->chunk_left : n;
            on_text(c, p, take, now);
            c->chunk_left -= take;
            p += take;
            n -= take;
            if (!c->chunk_left) c->part = DATA_END;
            continue;
        }
        char ch = *p++;
        n--;
        if (ch == '\n' && c->part == DATA_END) c->part = SIZE;
        else if (ch == '\n' && c->part != TRAILER) c->part = c->chunk_left ? DATA : TRAILER;
        else if (c->part == SIZE && ch != '\r') {
            int digit = ch >= '0' && ch <= '9' ? ch - '0' : (ch | 32) >= 'a' && (ch | 32) <= 'f' ? (ch | 32) - 'a' + 10 : -1;
            if (digit < 0) c->part = EXTENSION;
            else c->chunk_left = c->chunk_left * 16 + (uint64_t)digit;
        }
    }
}

/* Takes the response head out of what was read; returns how many bytes it used, or -1 when the answer is no stream. */
static long on_head(struct conn *c, const char *p, size_t n, uint64_t now) {
    size_t before = c->head_len, room = sizeof c->head - 1 - before, take = n < room ? n : room;
    if (!before) c->first_byte_at = now;
    memcpy(c->head + before, p, take);
    c->head[c->head_len += take] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) return take < n ? -1 : (long)n;
    *end = 0;
    if (strncmp(c->head + 9, opt.messages.count ? "101" : "200", 3)) {
        snprintf(bad_status, sizeof bad_status, "%.3s", c->head + 9);
        return -1;
    }
    c->chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != NULL;
    c->state = BODY;
    answered++;
    if (opt.messages.count) say(c);
    return (long)((size_t)(end + 4 - c->head) - before);
}

static void finish(struct conn *c, uint64_t now) {
    close(c->fd);
    c->fd = -1;
    c->state = CLOSED;
    unfinished--;
    if (opt.mode == START) {
        add(&first_byte, c->first_byte_at - c->opened_at);
        add(&first_frame, c->first_frame_at - c->opened_at);
        return;
    }
    if (measuring) {
        replays++;
        add(&first_byte, c->first_byte_at - c->opened_at);
        add(&first_frame, c->first_frame_at - c->opened_at);
        add(&whole, now - c->opened_at);
    }
    c->reopen_at = now + (uint64_t)opt.pause_us;
    if (!opt.pause_us) open_conn(c);
}

static void on_readable(struct conn *c) {
    static char buffer[256 * 1024];
    ssize_t got = recv(c->fd, buffer, sizeof buffer, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0 || c->state == CONNECTING) {
        closed++;
        if (opt.expect || c->state != BODY) { fail(c); return; }
        close(c->fd);
        c->fd = -1;
        c->state = CLOSED;
        unfinished--;
        return;
    }
    uint64_t now = now_us();
    if (measuring) bytes_read += (uint64_t)got, reads++;
    const char *p = buffer;
    size_t n = (size_t)got;
    if (c->state == HEAD) {
        long used = on_head(c, p, n, now);
        if (used < 0) { fail(c); return; }
        p += used;
        n -= (size_t)used;
    }
    if (c->state == BODY && n) on_body(c, p, n, now);
    if (opt.expect && c->frames >= opt.expect) finish(c, now);
}

static void on_event(struct conn *c, uint32_t events) {
    if (c->state == CONNECTING && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) { fail(c); return; }
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
        send_request(c);
    } else if (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
        on_readable(c);
    }
}

static void pump(void) {
    struct epoll_event batch[512];
    /* Not more than 64 unanswered, except in a burst, which is about exactly that. */
    while (opened < opt.conns && (opt.mode == START || opened - answered < 64)) open_conn(&conns[opened++]);
    int n = epoll_wait(poller, batch, 512, 1);
    for (int i = 0; i < n; i++) on_event(batch[i].data.ptr, batch[i].events);
    if (opt.pause_us) {
        uint64_t now = now_us();
        for (int i = 0; i < opened; i++)
            if (conns[i].state == CLOSED && conns[i].reopen_at && conns[i].reopen_at <= now) open_conn(&conns[i]);
    }
}

static void pump_for(double seconds) {
    for (uint64_t end = now_us() + (uint64_t)(seconds * 1e6); now_us() < end;) pump();
}

static int die(const char *why) {
    printf("{\"failed\":\"%s\",\"opened\":%d,\"answered\":%d,\"errors\":%lu,\"status\":\"%s\"}\n", why, opened, answered, errors,
           bad_status);
    return 1;
}

static int run_bursts(void) {
    for (int b = 0; b < opt.bursts; b++) {
        size_t from = first_byte.count;
        opened = unfinished = 0;
        uint64_t give_up = now_us() + 10000000;
        do pump();
        while (unfinished && now_us() < give_up);
        if (unfinished) return -1;
        uint64_t worst_byte = 0, worst_frame = 0;
        for (size_t i = from; i < first_byte.count; i++) {
            if (first_byte.values[i] > worst_byte) worst_byte = first_byte.values[i];
            if (first_frame.values[i] > worst_frame) worst_frame = first_frame.values[i];
        }
        if (first_byte.count > from) add(&burst_byte, worst_byte), add(&burst_frame, worst_frame);
        usleep((useconds_t)(opt.pause_us ? opt.pause_us : 100000));
    }
    return 0;
}

static struct lines one_or_file(char *text, int is_file) {
    struct lines l = {NULL, 0};
    char line[8192];
    FILE *f = is_file ? fopen(text, "r") : fmemopen(text, strlen(text), "r");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\r\n")] = 0;
        if (!*line) continue;
        l.items = realloc(l.items, (size_t)(l.count + 1) * sizeof *l.items);
        l.items[l.count++] = strdup(line);
    }
    if (!l.count) fprintf(stderr, "load: nothing in %s\n", text), exit(2);
    fclose(f);
    return l;
}

static void parse(int argc, char **argv) {
    static const struct option table[] = {
        {"mode", 1, 0, 'm'},   {"port", 1, 0, 'p'},   {"conns", 1, 0, 'c'},    {"path", 1, 0, 'g'},     {"paths", 1, 0, 'G'},
        {"messages", 1, 0, 'M'}, {"body", 1, 0, 'b'},   {"bodies", 1, 0, 'B'}, {"warm", 1, 0, 'w'},     {"window", 1, 0, 'f'},      {"expect", 1, 0, 'e'},
        {"first", 1, 0, '1'},  {"count", 1, 0, 'n'},  {"pause-us", 1, 0, 'u'}, {"bursts", 1, 0, 'r'},   {"pid", 1, 0, 'i'},
        {0, 0, 0, 0}};
    for (int o; (o = getopt_long(argc, argv, "", table, NULL)) != -1;) switch (o) {
        case 'm': for (opt.mode = 0; MODE_NAMES[opt.mode] && strcmp(MODE_NAMES[opt.mode], optarg);) opt.mode++; break;
        case 'p': opt.port = atoi(optarg); break;
        case 'c': opt.conns = atoi(optarg); break;
        case 'g': case 'G': opt.paths = one_or_file(optarg, o == 'G'); break;
        case 'b': case 'B': opt.bodies = one_or_file(optarg, o == 'B'); break;
        case 'M': opt.messages = one_or_file(optarg, 1); break;
        case 'w': opt.warm = atof(optarg); break;
        case 'f': opt.window = atof(optarg); break;
        case 'e': opt.expect = atol(optarg); break;
        case '1': opt.first = atol(optarg); break;
        case 'n': opt.count_data = !strcmp(optarg, "data"); break;
        case 'u': opt.pause_us = atol(optarg); break;
        case 'r': opt.bursts = atoi(optarg); break;
        case 'i': if (opt.pid_count < 16) opt.pids[opt.pid_count++] = atoi(optarg); break;
        default: exit(2);
    }
    if (!opt.port || !opt.paths.count || opt.conns < 1 || !MODE_NAMES[opt.mode])
        fprintf(stderr, "load: needs --mode, --port, --conns and --path or --paths\n"), exit(2);
    if (!opt.expect && (opt.mode == RESUME || opt.mode == START)) opt.expect = 1;
    if (!opt.expect && opt.mode == REPLAY) fprintf(stderr, "load: replay needs --expect\n"), exit(2);
}

int main(int argc, char **argv) {
    parse(argc, argv);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    conns = calloc((size_t)opt.conns, sizeof *conns);
    for (int i = 0; i < opt.conns; i++) conns[i].index = i;

    long rss_before = memory_of("Rss", opt.pids, opt.pid_count), pss_before = memory_of("Pss", opt.pids, opt.pid_count);
    for (uint64_t give_up = now_us() + 30000000; opt.mode <= IDLE && answered < opt.conns; pump())
        if (now_us() > give_up) return die("not every connection was answered within 30 s");
    if (opt.mode != START) pump_for(opt.warm);

    struct usage before = usage_of(opt.pids, opt.pid_count);
    clock_t own_before = clock();
    uint64_t own_wait = kept_waiting("self");
    window_from = now_us();
    measuring = 1;
    if (opt.mode != START) pump_for(opt.window);
    else if (run_bursts()) return die("a burst was not answered within 10 s");
    measuring = 0;
    window_to = now_us();
    struct usage after = usage_of(opt.pids, opt.pid_count);
    double seconds = (double)(window_to - window_from) / 1e6, cpu = (double)(after.cpu_ns - before.cpu_ns) / 1e9;
    printf("{\"mode\":\"%s\",\"window_s\":%.3f,\"from_us\":%lu,\"to_us\":%lu,\"frames\":%lu,\"gaps\":%lu,\"errors\":%lu,"
           "\"closed\":%lu,\"status\":\"%s\",\"bytes\":%lu,\"reads\":%lu,\"replays\":%lu,\"server_cpu_s\":%.6f,"
           "\"server_wait_s\":%.6f,\"client_cpu_s\":%.6f,\"client_wait_s\":%.6f",
           MODE_NAMES[opt.mode], seconds, window_from, window_to, frames, gaps, errors, closed, bad_status, bytes_read, reads,
           replays, cpu, (double)(after.wait_ns - before.wait_ns) / 1e9, (double)(clock() - own_before) / CLOCKS_PER_SEC,
           (double)(kept_waiting("self") - own_wait) / 1e9);
    printf(",\"rss_before_kb\":%ld,\"pss_before_kb\":%ld,\"rss_kb\":%ld,\"pss_kb\":%ld", rss_before, pss_before,
           memory_of("Rss", opt.pids, opt.pid_count), memory_of("Pss", opt.pids, opt.pid_count));
    print_samples("latency_us", &latency);
    print_samples("first_byte_us", &first_byte);
    print_samples("first_frame_us", &first_frame);
    print_samples("whole_us", &whole);
    print_samples("burst_first_byte_us", &burst_byte);
    print_samples("burst_first_frame_us", &burst_frame);
    printf("}\n");
    return 0;
}
