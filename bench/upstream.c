/* A fake OpenAI-compatible endpoint for benchmarks: chat completions as Server-Sent Events, one thread, epoll + timerfd.
 *
 * It simulates: no model runs here. What it sends is asked for in the prompt, so that any gateway can pass it through:
 *   tokens=N      how many tokens (16)
 *   every_us=D    one token each D microseconds (0: as fast as the socket takes them), one write() each
 *   first_us=F    before the first token (0)
 *   stamp=1       the text is " @" + 16 digits, microseconds of CLOCK_MONOTONIC at the write; else " w00042"
 * Times are absolute (first + i * D): a late token does not push back the next, so the offered rate is the asked one.
 * Streams that arrive together are spread over one interval, or they would all write in the same instant.
 *
 * GET /stats -> {"requests","tokens","open","done","aborted"}; a connection that closes before its end is an abort.
 * On stdout: the port, once it listens. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STREAMS = 16384, MAX_REQUEST = 1 << 20 };

struct conn {
    int fd, slot; /* slot in `active`, -1 when no stream runs */
    int64_t first_due;
    long tokens, every_us, sent;
    int stamp, usage;
    char *in;
    size_t in_len, in_room;
    char *out; /* what the socket would not take */
    size_t out_len, out_room;
    struct conn *next_buried;
};

static struct conn *active[MAX_STREAMS];
static int64_t due[MAX_STREAMS]; /* beside `active`: the scan for what is due touches nothing else */
static int active_count, poller, timer;
static struct conn *buried; /* freed only after the batch: a later event of it may still point there */
static long requests, tokens_sent, done, aborted;

#define ENVELOPE "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\""

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void deactivate(struct conn *c) {
    if (c->slot < 0) return;
    int last = --active_count;
    active[c->slot] = active[last];
    due[c->slot] = due[last];
    active[c->slot]->slot = c->slot;
    c->slot = -1;
}

static void drop(struct conn *c) {
    if (c->fd < 0) return;
    if (c->slot >= 0) aborted++;
    deactivate(c);
    close(c->fd);
    c->fd = -1;
    c->next_buried = buried;
    buried = c;
}

static void watch(struct conn *c, uint32_t events) {
    struct epoll_event e = {.events = events, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

static void put(struct conn *c, const char *p, size_t n) {
    if (c->fd < 0) return;
    if (!c->out_len) {
        ssize_t sent = send(c->fd, p, n, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) { drop(c); return; }
        if (sent > 0) p += sent, n -= (size_t)sent;
    }
    if (!n) return;
    if (!c->out_len) watch(c, EPOLLIN | EPOLLOUT);
    if (c->out_len + n > c->out_room) c->out = realloc(c->out, c->out_room = (c->out_len + n) * 2);
    memcpy(c->out + c->out_len, p, n);
    c->out_len += n;
}

static void flush(struct conn *c) {
    ssize_t sent = send(c->fd, c->out, c->out_len, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) { drop(c); return; }
    if (sent <= 0) return;
    c->out_len -= (size_t)sent;
    memmove(c->out, c->out + sent, c->out_len);
    if (!c->out_len) watch(c, EPOLLIN);
}

static void put_event(struct conn *c, const char *json) {
    char text[1024];
    int n = snprintf(text, sizeof text, "%zx\r\ndata: %s\n\n\r\n", strlen(json) + 8, json);
    put(c, text, (size_t)n);
}

static void put_delta(struct conn *c, const char *delta, const char *finish) {
    char json[512];
    snprintf(json, sizeof json, ENVELOPE ",\"choices\":[{\"index\":0,\"delta\":{%s},\"finish_reason\":%s}]}", delta, finish);
    put_event(c, json);
}

static void end_stream(struct conn *c) {
    char json[512];
    deactivate(c);
    done++;
    put_delta(c, "", "\"stop\"");
    if (c->usage) {
        snprintf(json, sizeof json,
                 ENVELOPE ",\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":%ld,\"total_tokens\":%ld}}",
                 c->sent, c->sent + 1);
        put_event(c, json);
    }
    put_event(c, "[DONE]");
    put(c, "0\r\n\r\n", 5);
}

static void put_token(struct conn *c) {
    char delta[64];
    if (c->stamp) snprintf(delta, sizeof delta, "\"content\":\" @%016lld\"", (long long)now_us());
    else snprintf(delta, sizeof delta, "\"content\":\" w%05ld\"", c->sent % 100000);
    c->sent++;
    tokens_sent++;
    put_delta(c, delta, "null");
}

static void respond(struct conn *c, int status, const char *json) {
    char text[1024];
    int n = snprintf(text, sizeof text, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                     status, status == 200 ? "OK" : "Refused", strlen(json), json);
    put(c, text, (size_t)n);
}

static long option(const char *body, const char *name, long otherwise) {
    const char *p = strstr(body, name);
    return p ? atol(p + strlen(name)) : otherwise;
}

static void begin_stream(struct conn *c, const char *body) {
    static const char HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                               "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
    requests++;
    if (active_count == MAX_STREAMS) { respond(c, 503, "{\"error\":{\"message\":\"too many streams\"}}"); return; }
    c->tokens = option(body, "tokens=", 16);
    c->every_us = option(body, "every_us=", 0);
    c->stamp = option(body, "stamp=", 0) != 0;
    c->usage = strstr(body, "include_usage") != NULL;
    c->sent = 0;
    /* Multiples of the golden ratio fill an interval evenly, however many there are. */
    double turn = (double)requests * 0.6180339887;
    c->first_due = now_us() + option(body, "first_us=", 0) + (int64_t)((turn - (double)(long)turn) * (double)c->every_us);
    put(c, HEAD, sizeof HEAD - 1);
    put_delta(c, "\"role\":\"assistant\",\"content\":\"\"", "null");
    if (c->fd < 0) return;
    c->slot = active_count;
    active[active_count] = c;
    due[active_count++] = c->first_due;
}

static void on_request(struct conn *c, const char *body) {
    char json[256];
    if (!strncmp(c->in, "GET /v1/models", 14)) {
        respond(c, 200, "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"owned_by\":\"bench\"}]}");
    } else if (!strncmp(c->in, "GET /stats", 10)) {
        snprintf(json, sizeof json, "{\"requests\":%ld,\"tokens\":%ld,\"open\":%d,\"done\":%ld,\"aborted\":%ld}", requests,
                 tokens_sent, active_count, done, aborted);
        respond(c, 200, json);
    } else if (strncmp(c->in, "POST /v1/chat/completions", 25)) {
        respond(c, 404, "{\"error\":{\"message\":\"no such route\"}}");
    } else if (!strstr(body, "\"stream\":true") && !strstr(body, "\"stream\": true")) {
        respond(c, 400, "{\"error\":{\"message\":\"this endpoint only streams\"}}");
    } else {
        begin_stream(c, body);
    }
}

/* A keep-alive connection carries one request after another; the next one waits until the stream of the last has ended. */
static void take_requests(struct conn *c) {
    while (c->fd >= 0 && c->slot < 0) {
        char *head_end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
        if (!head_end) return;
        *head_end = 0;
        const char *length = strcasestr(c->in, "\r\ncontent-length:");
        *head_end = '\r';
        size_t head = (size_t)(head_end + 4 - c->in), body = length ? (size_t)atol(length + 17) : 0;
        if (body > MAX_REQUEST) { drop(c); return; }
        if (c->in_len < head + body) return;
        char kept = c->in[head + body];
        c->in[head + body] = 0;
        on_request(c, c->in + head);
        if (c->fd < 0) return;
        c->in[head + body] = kept;
        c->in_len -= head + body;
        memmove(c->in, c->in + head + body, c->in_len);
    }
}

static void on_readable(struct conn *c) {
    if (c->in_room - c->in_len < 16384) c->in = realloc(c->in, (c->in_room = c->in_len + 65536) + 1);
    ssize_t got = recv(c->fd, c->in + c->in_len, c->in_room - c->in_len, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0 || c->in_len + (size_t)got > 2 * MAX_REQUEST) { drop(c); return; }
    c->in_len += (size_t)got;
    take_requests(c);
}

static void accept_all(int listener) {
    for (int fd, one = 1; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->slot = -1;
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
}

static void send_what_is_due(void) {
    int64_t now = now_us();
    /* Backwards: a stream that ends or dies here gives its slot to one that has been looked at. */
    for (int i = active_count - 1; i >= 0; i--) {
        struct conn *c = active[i];
        int paced = c->every_us > 0;
        while (c->slot == i && due[i] <= now && !c->out_len) {
            if (c->sent == c->tokens) { end_stream(c); take_requests(c); break; }
            put_token(c);
            if (c->slot == i) due[i] = c->first_due + c->sent * c->every_us;
            if (!paced) break;
        }
    }
}

/* A stream whose socket is full waits for EPOLLOUT, not for the timer, which would fire at once for ever. */
static int arm_timer(void) {
    int64_t earliest = INT64_MAX;
    for (int i = 0; i < active_count; i++)
        if (due[i] < earliest && !active[i]->out_len) earliest = due[i];
    if (earliest == INT64_MAX) return -1;
    if (earliest <= now_us()) return 0;
    struct itimerspec at = {.it_value = {earliest / 1000000, earliest % 1000000 * 1000}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
    return -1;
}

static int listen_on(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 4096)) perror("upstream: listen"), exit(1);
    getsockname(fd, (struct sockaddr *)&at, &size);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    return fd;
}

int main(int argc, char **argv) {
    struct epoll_event batch[512], e = {.events = EPOLLIN};
    struct rlimit files;
    static int is_listener, is_timer; /* addresses that mark the two descriptors that are no connection */
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    int listener = listen_on(argc > 1 ? atoi(argv[1]) : 0);
    e.data.ptr = &is_listener;
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    e.data.ptr = &is_timer;
    e.events |= EPOLLET; /* one wake-up each time it fires, without a read() to reset it */
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &e);
    for (;;) {
        int n = epoll_wait(poller, batch, 512, arm_timer());
        for (int i = 0; i < n; i++) {
            struct conn *c = batch[i].data.ptr;
            if (batch[i].data.ptr == &is_listener) { accept_all(listener); continue; }
            if (batch[i].data.ptr == &is_timer) continue;
            if (c->fd >= 0 && batch[i].events & EPOLLOUT) flush(c);
            if (c->fd >= 0 && batch[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c);
        }
        send_what_is_due();
        while (buried) {
            struct conn *c = buried;
            buried = c->next_buried;
            free(c->in);
            free(c->out);
            free(c);
        }
    }
}
