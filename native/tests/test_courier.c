/* The courier: every order once and in turn, over parking and closing. Run it under TSan and ASan.
 *
 *     test_courier [orders]     how many orders the first test posts, 20,000 by default */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "check.h"

enum { CELLS = 8, RECORD = 64, RECORDS = 16 };

typedef struct {
    uint8_t *ring;
    uint8_t records[RECORDS][RECORD], buffers[GLM53_MOST_COPIES][RECORD];
    atomic_uint arrived;
    atomic_int num_copies, error;
    uint32_t seq;
    glm53_courier *courier;
} office;

static int32_t enter(void *context) {
    CHECK(context != NULL);
    return 0;
}

static int32_t copy(uint64_t target, const void *source, size_t num_bytes, void *stream) {
    office *o = stream;
    if (atomic_load(&o->error)) return atomic_load(&o->error);
    memcpy((void *)(uintptr_t)target, source, num_bytes);
    atomic_fetch_add(&o->num_copies, 1);
    return 0;
}

static int32_t mark(void *stream, uint64_t address, uint32_t value, uint32_t flags) {
    office *o = stream;
    CHECK(address == (uint64_t)(uintptr_t)&o->arrived && flags == 0);
    CHECK(value == atomic_load(&o->arrived) + 1);
    atomic_store(&o->arrived, value);
    return 0;
}

static office *open_office(uint32_t first_seq, int32_t poll_us) {
    office *o = calloc(1, sizeof *o);
    CHECK(o != NULL);
    o->ring = aligned_alloc(GLM53_COURIER_CELL_BYTES, CELLS * GLM53_COURIER_CELL_BYTES);
    for (int32_t i = 0; i < RECORDS; i++) memset(o->records[i], i + 1, RECORD);
    o->seq = first_seq;
    atomic_init(&o->arrived, first_seq - 1);
    CHECK(o->ring && glm53_courier_init(o->ring, CELLS, first_seq) == GLM53_OK);
    glm53_courier_config config = {
        .ring = o->ring,
        .num_cells = CELLS,
        .first_seq = first_seq,
        .record_bytes = RECORD,
        .enter = enter,
        .copy = copy,
        .mark = mark,
        .context = o,
        .stream = o,
        .arrived = (uint64_t)(uintptr_t)&o->arrived,
        .poll_us = poll_us,
    };
    CHECK(glm53_courier_create(&config, &o->courier) == GLM53_OK);
    return o;
}

static void close_office(office *o) {
    glm53_courier_destroy(o->courier);
    free(o->ring);
    free(o);
}

/* As a kernel posts: the number last. */
static uint32_t post(office *o, const int32_t *records, uint32_t count) {
    uint32_t seq = o->seq++;
    uint8_t *cell = o->ring + seq % CELLS * GLM53_COURIER_CELL_BYTES;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t source = (uint64_t)(uintptr_t)o->records[records[i]];
        uint64_t target = (uint64_t)(uintptr_t)o->buffers[i];
        memcpy(cell + 8 + 8 * i, &source, sizeof source);
        memcpy(cell + 40 + 8 * i, &target, sizeof target);
    }
    memcpy(cell + 4, &count, sizeof count);
    __atomic_store_n((uint32_t *)cell, seq, __ATOMIC_RELEASE);
    return seq;
}

static void await(office *o, uint32_t seq) {
    while (atomic_load(&o->arrived) != seq) {
        const struct timespec pause = {.tv_nsec = 1000};
        nanosleep(&pause, NULL);
    }
}

static void test_orders_in_turn(uint32_t first_seq, int32_t num_orders, int32_t poll_us) {
    office *o = open_office(first_seq, poll_us);
    uint32_t seed = 5;
    int32_t num_copies = 0;
    for (int32_t n = 0; n < num_orders; n++) {
        int32_t records[GLM53_MOST_COPIES];
        seed = seed * 1664525u + 1013904223u;
        uint32_t count = (seed >> 16) % (GLM53_MOST_COPIES + 1);
        for (uint32_t i = 0; i < count; i++) records[i] = (int32_t)((seed >> (8 + 4 * i)) % RECORDS);
        if (n % 3 == 0) glm53_courier_ring(o->courier);
        await(o, post(o, records, count));
        for (uint32_t i = 0; i < count; i++) {
            CHECK(memcmp(o->buffers[i], o->records[records[i]], RECORD) == 0);
        }
        num_copies += (int32_t)count;
    }
    CHECK(atomic_load(&o->num_copies) == num_copies);
    glm53_courier_stats stats;
    CHECK(glm53_courier_describe(o->courier, &stats) == GLM53_OK);
    CHECK(stats.num_copies == num_copies && stats.error == 0);
    close_office(o);
}

static void test_parked_ones_wake(void) {
    office *o = open_office(1, 0);
    const struct timespec pause = {.tv_nsec = 5000000};
    for (int32_t n = 0; n < 20; n++) {
        nanosleep(&pause, NULL);
        if (n != 10) glm53_courier_ring(o->courier); /* once nobody rings */
        await(o, post(o, &(int32_t){n % RECORDS}, 1));
    }
    glm53_courier_stats stats;
    CHECK(glm53_courier_describe(o->courier, &stats) == GLM53_OK && stats.num_parks > 0);
    close_office(o);
}

static void test_errors_end_it(void) {
    office *o = open_office(1, 100);
    await(o, post(o, &(int32_t){2}, 1));
    atomic_store(&o->error, 719);
    post(o, &(int32_t){3}, 1);
    glm53_courier_stats stats = {0};
    while (!stats.error) CHECK(glm53_courier_describe(o->courier, &stats) == GLM53_OK);
    CHECK(stats.error == 719 && atomic_load(&o->arrived) == 1);
    close_office(o);
}

static void test_what_cannot_be_is_refused(void) {
    _Alignas(GLM53_COURIER_CELL_BYTES) static uint8_t ring[CELLS * GLM53_COURIER_CELL_BYTES];
    CHECK(glm53_courier_init(NULL, CELLS, 1) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_courier_init(ring + 4, CELLS, 1) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_courier_init(ring, 6, 1) == GLM53_BAD_ARGUMENT);
    glm53_courier_config config = {.ring = ring, .num_cells = CELLS, .record_bytes = 1, .copy = copy};
    glm53_courier *courier = NULL;
    CHECK(glm53_courier_create(&config, &courier) == GLM53_BAD_ARGUMENT && courier == NULL);
    CHECK(glm53_courier_create(NULL, &courier) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_courier_describe(NULL, NULL) == GLM53_BAD_ARGUMENT);
    glm53_courier_destroy(NULL);
}

int main(int argc, char **argv) {
    int32_t num_orders = argc > 1 ? atoi(argv[1]) : 20000;
    test_orders_in_turn(1, num_orders, 2000);
    test_orders_in_turn(UINT32_MAX - 5, 300, 2000);
    test_orders_in_turn(7, 300, 0);
    test_parked_ones_wake();
    for (int32_t i = 0; i < 50; i++) close_office(open_office(1, i % 2 * 100));
    test_errors_end_it();
    test_what_cannot_be_is_refused();
    printf("courier: ok\n");
    return 0;
}
