/* The courier's thread: takes orders from its ring in turn and hands them to the driver.
 *
 *   AWAKE    posted == seq -> copies, then the number; next seq
 *   AWAKE    nothing for poll_us -> PARKED
 *   PARKED   doorbell, or a post seen by the look ten times a second -> AWAKE
 *   any      an error of the driver, or destroy -> ended */
#define _GNU_SOURCE
#include <stdlib.h>

#include "crew.h"

enum { WORD_POSTED = 0, WORD_NUM_COPIES = 4, WORDS_SOURCES = 8, WORDS_TARGETS = 40 };

static const int64_t LOOK_NS = 100 * 1000000;

struct glm53_courier {
    glm53_courier_config config;
    pthread_t thread;
    bed sleep;
    atomic_uint bell;
    atomic_int is_closing, error;
    atomic_llong num_orders, num_copies, num_parks;
};

static bool is_power_of_two(int32_t cells) {
    return cells >= 2 && cells <= 4096 && (cells & (cells - 1)) == 0;
}

static uint8_t *cell(void *ring, int32_t num_cells, uint32_t seq) {
    return (uint8_t *)ring + (size_t)(seq % (uint32_t)num_cells) * GLM53_COURIER_CELL_BYTES;
}

static uint32_t *posted_word(const glm53_courier *courier, uint32_t seq) {
    return (uint32_t *)(cell(courier->config.ring, courier->config.num_cells, seq) + WORD_POSTED);
}

static bool has_order(const glm53_courier *courier, uint32_t seq) {
    return __atomic_load_n(posted_word(courier, seq), __ATOMIC_SEQ_CST) == seq;
}

int32_t glm53_courier_init(void *ring, int32_t num_cells, uint32_t first_seq) {
    if (!ring || (uintptr_t)ring % GLM53_COURIER_CELL_BYTES || !is_power_of_two(num_cells)) {
        return GLM53_BAD_ARGUMENT;
    }
    for (uint32_t i = 0; i < (uint32_t)num_cells; i++) {
        uint32_t seq = first_seq + i;
        uint8_t *one = cell(ring, num_cells, seq);
        memset(one, 0, GLM53_COURIER_CELL_BYTES);
        uint32_t before = seq - (uint32_t)num_cells;
        memcpy(one + WORD_POSTED, &before, sizeof before);
    }
    return GLM53_OK;
}

/* 0, or the driver's error; -1 for an order that cannot be. */
static int32_t deliver(glm53_courier *courier, uint32_t seq) {
    const glm53_courier_config *config = &courier->config;
    const uint8_t *one = cell(config->ring, config->num_cells, seq);
    uint32_t count;
    memcpy(&count, one + WORD_NUM_COPIES, sizeof count);
    if (count > GLM53_MOST_COPIES) return -1;
    uint64_t sources[GLM53_MOST_COPIES], targets[GLM53_MOST_COPIES];
    memcpy(sources, one + WORDS_SOURCES, sizeof sources);
    memcpy(targets, one + WORDS_TARGETS, sizeof targets);
    for (uint32_t i = 0; i < count; i++) {
        const void *source = (const void *)(uintptr_t)sources[i];
        int32_t error = config->copy(targets[i], source, (size_t)config->record_bytes, config->stream);
        if (error) return error;
    }
    atomic_fetch_add(&courier->num_copies, count);
    return config->mark(config->stream, config->arrived, seq, 0);
}

/* Until the doorbell, a post, a closing, or the next look. */
static void park(glm53_courier *courier, uint32_t seq, uint32_t bell) {
    bed *b = &courier->sleep;
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->num_sleepers, 1);
    if (!atomic_load(&courier->is_closing) && atomic_load(&courier->bell) == bell &&
        !has_order(courier, seq)) {
        atomic_fetch_add(&courier->num_parks, 1);
        bed_sleep_until(b, now_ns() + LOOK_NS);
    }
    atomic_fetch_sub(&b->num_sleepers, 1);
    pthread_mutex_unlock(&b->mutex);
}

static void *run(void *argument) {
    glm53_courier *courier = argument;
    const int64_t poll_ns = (int64_t)courier->config.poll_us * 1000;
    int32_t error = courier->config.enter(courier->config.context);
    uint32_t seq = courier->config.first_seq, bell = atomic_load(&courier->bell);
    int64_t since = now_ns();
    while (!error && !atomic_load(&courier->is_closing)) {
        if (has_order(courier, seq)) {
            error = deliver(courier, seq++);
            if (error) atomic_store(&courier->error, error); /* before it counts: who waits looks at both */
            atomic_fetch_add(&courier->num_orders, 1);
            since = now_ns();
            continue;
        }
        for (int i = 0; i < ROUNDS && !has_order(courier, seq); i++) cpu_relax();
        uint32_t rung = atomic_load(&courier->bell);
        if (rung != bell) {
            bell = rung;
            since = now_ns();
        }
        if (now_ns() - since > poll_ns && !has_order(courier, seq)) park(courier, seq, bell);
    }
    atomic_store(&courier->error, error);
    return NULL;
}

int32_t glm53_courier_create(const glm53_courier_config *config, glm53_courier **out) {
    if (!out) return GLM53_BAD_ARGUMENT;
    *out = NULL;
    if (!config || !config->ring || (uintptr_t)config->ring % GLM53_COURIER_CELL_BYTES ||
        !is_power_of_two(config->num_cells) || config->record_bytes < 1 || !config->enter || !config->copy ||
        !config->mark || config->poll_us < 0) {
        return GLM53_BAD_ARGUMENT;
    }
    glm53_courier *courier = calloc(1, sizeof *courier);
    if (!courier) return GLM53_NO_MEMORY;
    courier->config = *config;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&courier->sleep.mutex, NULL);
    pthread_cond_init(&courier->sleep.changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (pthread_create(&courier->thread, NULL, run, courier) != 0) {
        free(courier);
        return GLM53_NO_THREAD;
    }
    *out = courier;
    return GLM53_OK;
}

void glm53_courier_destroy(glm53_courier *courier) {
    if (!courier) return;
    atomic_store(&courier->is_closing, 1);
    bed_wake(&courier->sleep);
    pthread_join(courier->thread, NULL);
    pthread_cond_destroy(&courier->sleep.changed);
    pthread_mutex_destroy(&courier->sleep.mutex);
    free(courier);
}

void glm53_courier_ring(glm53_courier *courier) {
    atomic_fetch_add(&courier->bell, 1);
    bed_wake(&courier->sleep);
}

int32_t glm53_courier_describe(const glm53_courier *courier, glm53_courier_stats *stats) {
    if (!courier || !stats) return GLM53_BAD_ARGUMENT;
    *stats = (glm53_courier_stats){
        .num_orders = atomic_load(&courier->num_orders),
        .num_copies = atomic_load(&courier->num_copies),
        .num_parks = atomic_load(&courier->num_parks),
        .error = atomic_load(&courier->error),
    };
    return GLM53_OK;
}
