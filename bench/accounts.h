/* What the load client measures with: a clock, samples, and the accounts the kernel keeps of other processes. */
#ifndef BENCH_ACCOUNTS_H
#define BENCH_ACCOUNTS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

struct samples {
    uint32_t *values;
    size_t count, room;
};

struct usage {
    uint64_t cpu_ns, wait_ns; /* of all threads; of the first thread */
};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void add(struct samples *s, uint64_t value) {
    if (s->count == s->room) {
        s->room = s->room ? s->room * 2 : 4096;
        s->values = realloc(s->values, s->room * sizeof *s->values);
        if (!s->values) abort();
    }
    s->values[s->count++] = value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *s) {
    if (!s->count) return;
    qsort(s->values, s->count, sizeof *s->values, by_value);
    printf(",\"%s\":{\"n\":%zu,\"p50\":%u,\"p90\":%u,\"p99\":%u,\"max\":%u}", name, s->count, s->values[s->count / 2],
           s->values[s->count * 9 / 10], s->values[s->count * 99 / 100], s->values[s->count - 1]);
}

/* Nanoseconds this thread could have run and another had its core. */
static uint64_t kept_waiting(const char *pid) {
    char path[64];
    unsigned long long run, wait = 0;
    snprintf(path, sizeof path, "/proc/%s/schedstat", pid);
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%llu %llu", &run, &wait) != 2) wait = 0;
    if (f) fclose(f);
    return wait;
}

/* /proc/PID/stat counts ticks of 10 ms, a tenth of what some windows use in all; the process clock counts nanoseconds and
 * includes threads that have ended. */
static struct usage usage_of(const pid_t *pids, int count) {
    struct usage u = {0, 0};
    for (int i = 0; i < count; i++) {
        clockid_t clock;
        struct timespec t;
        char pid[16];
        if (clock_getcpuclockid(pids[i], &clock) || clock_gettime(clock, &t)) continue;
        u.cpu_ns += (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
        snprintf(pid, sizeof pid, "%d", pids[i]);
        u.wait_ns += kept_waiting(pid);
    }
    return u;
}

/* Reading smaps takes the server's memory lock for milliseconds: never inside a window. */
static long memory_of(const char *field, const pid_t *pids, int count) {
    long total = 0;
    for (int i = 0; i < count; i++) {
        char path[64], text[256];
        long kb;
        snprintf(path, sizeof path, "/proc/%d/smaps_rollup", pids[i]);
        FILE *f = fopen(path, "r");
        while (f && fgets(text, sizeof text, f))
            if (!strncmp(text, field, strlen(field)) && sscanf(text + strlen(field), ": %ld", &kb) == 1) total += kb;
        if (f) fclose(f);
    }
    return total;
}

#endif
