/* The mailbox and its crew: no job lost or answered twice, and no wait without end. Run it under TSan and
 * ASan.
 *
 *     test_mailbox [jobs]     how many jobs the first test sends, 20,000 by default */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "../src/mailbox.h"
#include "check.h"

enum {
    HIDDEN = 128,
    WIDTH = 384,
    BLOCKS = WIDTH / 128,
    LAYERS = 2,
    EXPERTS = 5,
    ROWS = 4,
    PICKS = 3,
    CELLS = 8
};
enum { DEADLINE_MS = 200, LONG_MS = 60000 };

typedef struct {
    glm53_expert table[LAYERS * EXPERTS];
    glm53_mailbox_shape shape;
    glm53_mailbox_layout layout;
    void *mailbox;
} office;

static office open_office(uint32_t first_seq) {
    office o = {.shape = {CELLS, ROWS, PICKS, HIDDEN, first_seq}};
    uint32_t seed = 3;
    for (int32_t e = 0; e < LAYERS * EXPERTS; e++) {
        o.table[e].gate = random_matrix(&seed, HIDDEN, WIDTH, 6, GLM53_CODEBOOK_MUL1);
        o.table[e].up = random_matrix(&seed, HIDDEN, WIDTH, 6, GLM53_CODEBOOK_MUL1);
        o.table[e].down = random_matrix(&seed, WIDTH, HIDDEN, 6, GLM53_CODEBOOK_MUL1);
    }
    CHECK(glm53_mailbox_measure(&o.shape, &o.layout) == GLM53_OK);
    o.mailbox = aligned_alloc(256, (size_t)o.layout.total_bytes);
    CHECK(o.mailbox && glm53_mailbox_init(o.mailbox, &o.shape) == GLM53_OK);
    return o;
}

static void close_office(office *o) {
    for (int32_t e = 0; e < LAYERS * EXPERTS; e++) {
        free_matrix(&o->table[e].gate);
        free_matrix(&o->table[e].up);
        free_matrix(&o->table[e].down);
    }
    free(o->mailbox);
}

static glm53_crew_config configure(const office *o) {
    return (glm53_crew_config){
        .mailbox = o->mailbox,
        .table = o->table,
        .num_layers = LAYERS,
        .num_experts = EXPERTS,
        .num_threads = 2,
        .poll_us = 500,
        .deadline_ms = LONG_MS,
    };
}

static glm53_crew *hire(const glm53_crew_config *config) {
    glm53_crew *crew;
    CHECK(glm53_crew_create(config, &crew) == GLM53_OK);
    return crew;
}

static uint8_t *cell_of(const office *o, uint32_t seq) {
    return (uint8_t *)o->mailbox + GLM53_MAIL_HEADER_BYTES +
           (size_t)(seq % CELLS) * (size_t)o->layout.cell_bytes;
}

static float *partial_of(const office *o, uint32_t seq) {
    return (float *)(void *)(cell_of(o, seq) + o->layout.y_offset);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- hand-over ---- */

/* Adds to y, so that a job that is computed twice shows; the producer clears y before it posts. */
static int32_t add_weighted_picks(void *context, const glm53_expert_job *job) {
    atomic_llong *num_calls = context;
    atomic_fetch_add(num_calls, 1);
    for (int32_t r = 0; r < job->rows; r++) {
        float *y = job->y + r * HIDDEN;
        for (int32_t i = 0; i < job->num_picks; i++) {
            int32_t pick = job->picks[r * job->num_picks + i];
            if (pick >= 0) y[0] += job->weights[r * job->num_picks + i] * (float)(pick + 1);
        }
        y[HIDDEN - 1] += job->x[r * HIDDEN];
    }
    return GLM53_OK;
}

typedef struct {
    uint32_t seq;
    int32_t rows;
    float sums[ROWS], marks[ROWS];
} sent;

static sent send_numbered(glm53_crew *crew, const office *o, uint32_t expected_seq, uint32_t *seed) {
    float x[ROWS * HIDDEN] = {0}, weights[ROWS * PICKS];
    int32_t picks[ROWS * PICKS];
    sent s = {.rows = 1 + (int32_t)(next_random(seed) % ROWS)};
    for (int32_t r = 0; r < s.rows; r++) {
        for (int32_t i = 0; i < PICKS; i++) {
            int32_t pick = (int32_t)(next_random(seed) % EXPERTS);
            float weight = (float)(next_random(seed) % 1000);
            picks[r * PICKS + i] = pick;
            weights[r * PICKS + i] = weight;
            s.sums[r] += weight * (float)(pick + 1);
        }
        x[r * HIDDEN] = s.marks[r] = (float)(next_random(seed) % 100000);
        partial_of(o, expected_seq)[r * HIDDEN] = partial_of(o, expected_seq)[r * HIDDEN + HIDDEN - 1] = 0.0f;
    }
    glm53_mail mail = {x, picks, weights, 0, s.rows, PICKS, 0, 0};
    CHECK(glm53_crew_post(crew, &mail, &s.seq) == GLM53_OK && s.seq == expected_seq);
    return s;
}

static void check_numbered(glm53_crew *crew, const office *o, const sent *s) {
    CHECK(glm53_crew_wait(crew, s->seq, LONG_MS) == GLM53_OK);
    for (int32_t r = 0; r < s->rows; r++) {
        const float *y = partial_of(o, s->seq) + r * HIDDEN;
        CHECK(y[0] == s->sums[r] && y[HIDDEN - 1] == s->marks[r]);
    }
}

/* Up to CELLS jobs under way at once; the numbers wrap around 2^32 on the way. */
static void test_every_job_is_answered_once(int64_t num_jobs) {
    uint32_t seed = 5, first_seq = UINT32_MAX - 1000;
    office o = open_office(first_seq);
    atomic_llong num_calls = 0;
    glm53_crew_config config = configure(&o);
    config.compute = add_weighted_picks;
    config.context = &num_calls;
    glm53_crew *crew = hire(&config);
    sent ring[CELLS];
    int64_t num_sent = 0, num_checked = 0;
    while (num_checked < num_jobs) {
        int64_t burst = 1 + (int64_t)(next_random(&seed) % CELLS);
        for (; num_sent < num_jobs && num_sent < num_checked + burst; num_sent++)
            ring[num_sent % CELLS] = send_numbered(crew, &o, first_seq + (uint32_t)num_sent, &seed);
        for (; num_checked < num_sent; num_checked++) check_numbered(crew, &o, &ring[num_checked % CELLS]);
    }
    glm53_crew_stats stats;
    CHECK(glm53_crew_describe(crew, &stats) == GLM53_OK);
    CHECK(stats.num_jobs == num_jobs && atomic_load(&num_calls) == num_jobs && !stats.is_failed);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

static void test_full_mailbox_refuses(void) {
    uint32_t seed = 1;
    office o = open_office(0);
    glm53_crew_config config = configure(&o);
    atomic_llong num_calls = 0;
    config.compute = add_weighted_picks;
    config.context = &num_calls;
    glm53_crew *crew = hire(&config);
    float x[HIDDEN] = {0}, weight = 1;
    int32_t pick = 0;
    glm53_mail mail = {x, &pick, &weight, 0, 1, 1, 0, 0};
    uint32_t seq, foreign = CELLS; /* a cell that somebody still uses: one lap behind */
    sent first = send_numbered(crew, &o, 0, &seed);
    check_numbered(crew, &o, &first);
    for (uint32_t i = 1; i < CELLS; i++) CHECK(glm53_crew_post(crew, &mail, &seq) == GLM53_OK);
    CHECK(glm53_crew_wait(crew, seq, LONG_MS) == GLM53_OK);
    glm53_mail_store(cell_of(&o, foreign), GLM53_MAIL_DONE, foreign - 2 * CELLS);
    CHECK(glm53_crew_post(crew, &mail, &seq) == GLM53_FULL);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

/* ---- real experts ---- */

static int32_t blocks_of(const office *o, uint32_t seq) {
    int32_t blocks;
    memcpy(&blocks, cell_of(o, seq) + GLM53_MAIL_NUM_BLOCKS, sizeof blocks);
    return blocks;
}

static int32_t expected_blocks(const glm53_expert_job *job) {
    int32_t blocks = 0;
    for (int32_t e = 0; e < EXPERTS; e++) {
        bool is_picked = false;
        for (int32_t i = 0; i < job->rows * job->num_picks; i++) is_picked |= job->picks[i] == e;
        bool is_part = job->part_end > 0 && job->part_expert == e;
        if (is_picked) blocks += is_part ? job->part_end : BLOCKS;
    }
    return blocks;
}

static void check_against_pool(glm53_crew *crew, const office *o, glm53_pool *pool, int32_t layer,
                               int32_t precision, uint32_t *seed) {
    int32_t rows = 1 + (int32_t)(next_random(seed) % ROWS);
    float *x = random_floats(seed, (size_t)rows * HIDDEN),
          *weights = random_floats(seed, (size_t)rows * PICKS);
    int32_t picks[ROWS * PICKS];
    for (int32_t i = 0; i < rows * PICKS; i++) picks[i] = (int32_t)(next_random(seed) % (EXPERTS + 1)) - 1;
    float expected[ROWS * HIDDEN];
    glm53_expert_job job = {.table = o->table + layer * EXPERTS, .x = x, .picks = picks, .weights = weights};
    job.y = expected;
    job.num_experts = EXPERTS;
    job.rows = rows;
    job.num_picks = PICKS;
    job.clamp = GLM53_CLAMP_ACTIVATION;
    job.precision = precision;
    job.limit = 2.0f;
    job.part_expert = (int32_t)(next_random(seed) % EXPERTS);
    job.part_end = (int32_t)(next_random(seed) % (BLOCKS + 1)); /* 0: no part */
    CHECK(glm53_experts(pool, &job) == GLM53_OK);
    glm53_mail mail = {x, picks, weights, layer, rows, PICKS, job.part_expert, job.part_end};
    uint32_t seq;
    CHECK(glm53_crew_post(crew, &mail, &seq) == GLM53_OK);
    CHECK(glm53_crew_wait(crew, seq, LONG_MS) == GLM53_OK);
    CHECK(memcmp(partial_of(o, seq), expected, (size_t)rows * HIDDEN * sizeof(float)) == 0);
    CHECK(blocks_of(o, seq) == expected_blocks(&job));
    free(x);
    free(weights);
}

static void test_partial_sums_are_those_of_the_kernels(int32_t precision) {
    office o = open_office(7);
    uint32_t seed = 11;
    glm53_crew_config config = configure(&o);
    config.precision = precision;
    config.clamp = GLM53_CLAMP_ACTIVATION;
    config.limit = 2.0f;
    glm53_crew *crew = hire(&config);
    glm53_pool *pool = make_pool(1, GLM53_ISA_AUTO);
    for (int32_t i = 0; i < 100; i++) check_against_pool(crew, &o, pool, i % LAYERS, precision, &seed);
    glm53_pool_destroy(pool);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

/* What a device does: it writes the cell itself, in f16, and rings once before. */
static void test_device_posts_f16_rows(void) {
    office o = open_office(0);
    glm53_crew_config config = configure(&o);
    glm53_crew *crew = hire(&config);
    uint8_t *cell = cell_of(&o, 0);
    uint16_t *halves = (uint16_t *)(void *)(cell + o.layout.x_offset);
    float x[HIDDEN], expected[HIDDEN], weight = 0.5f;
    for (int32_t i = 0; i < HIDDEN; i++) {
        halves[i] = (uint16_t)(0x3800 + 7 * i);
        x[i] = glm53_f16_to_f32(halves[i]);
    }
    int32_t job_words[4] = {1, 1, 1, GLM53_X_F16}, pick = 3;
    memcpy(cell + GLM53_MAIL_LAYER, job_words, sizeof job_words);
    memcpy(cell + GLM53_MAIL_PICKS, &pick, sizeof pick);
    memcpy(cell + o.layout.weights_offset, &weight, sizeof weight);
    glm53_crew_ring(crew);
    glm53_mail_store(cell, GLM53_MAIL_POSTED, 0);
    CHECK(glm53_crew_wait(crew, 0, LONG_MS) == GLM53_OK);
    glm53_pool *pool = make_pool(1, GLM53_ISA_AUTO);
    glm53_expert_job job = {.table = o.table + EXPERTS, .x = x, .picks = &pick, .weights = &weight};
    job.y = expected;
    job.num_experts = EXPERTS;
    job.rows = job.num_picks = 1;
    CHECK(glm53_experts(pool, &job) == GLM53_OK);
    CHECK(memcmp(partial_of(&o, 0), expected, sizeof expected) == 0);
    glm53_pool_destroy(pool);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

static void test_malformed_jobs_are_answered_with_an_error(void) {
    static const int32_t JOBS[][7] = {
        /* layer, rows, num_picks, x_kind, part_expert, part_blocks, pick */
        {LAYERS, 1, 1, 0, 0, 0, 0},     {-1, 1, 1, 0, 0, 0, 0},        {0, ROWS + 1, 1, 0, 0, 0, 0},
        {0, -1, 1, 0, 0, 0, 0},         {0, 1, PICKS + 1, 0, 0, 0, 0}, {0, 1, 0, 0, 0, 0, 0},
        {0, 1, 1, 2, 0, 0, 0},          {0, 1, 1, 0, 0, 0, EXPERTS},   {0, 1, 1, 0, 0, 0, -2 - EXPERTS},
        {0, 1, 1, 0, 0, BLOCKS + 1, 0}, {0, 1, 1, 0, 0, -1, 0},        {0, 1, 1, 0, EXPERTS, 1, 0},
        {0, 1, 1, 0, -1, 1, 0},
    };
    office o = open_office(0);
    glm53_crew_config config = configure(&o);
    glm53_crew *crew = hire(&config);
    CHECK(glm53_crew_check(crew) == GLM53_OK);
    for (uint32_t seq = 0; seq < sizeof JOBS / sizeof JOBS[0]; seq++) {
        uint8_t *cell = cell_of(&o, seq); /* more jobs than cells: each is answered before the next */
        memcpy(cell + GLM53_MAIL_LAYER, JOBS[seq], 6 * sizeof(int32_t));
        memcpy(cell + GLM53_MAIL_PICKS, &JOBS[seq][6], sizeof(int32_t));
        glm53_mail_store(cell, GLM53_MAIL_POSTED, seq);
        int32_t status = glm53_crew_wait(crew, seq, LONG_MS);
        bool is_empty = JOBS[seq][6] < 0; /* a negative pick is none */
        CHECK(is_empty ? status == GLM53_OK : status == GLM53_BAD_ARGUMENT || status == GLM53_BAD_PICK);
    }
    CHECK(glm53_crew_check(crew) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

/* ---- sleep ---- */

static void test_parked_crew_wakes_and_missed_doorbell_loses_nothing(void) {
    office o = open_office(0);
    uint32_t seed = 2;
    atomic_llong num_calls = 0;
    glm53_crew_config config = configure(&o);
    config.compute = add_weighted_picks;
    config.context = &num_calls;
    config.poll_us = 0;
    glm53_crew *crew = hire(&config);
    const struct timespec pause = {.tv_nsec = 2000000};
    uint32_t seq = 0;
    for (; seq < 50; seq++) {
        nanosleep(&pause, NULL);
        sent s = send_numbered(crew, &o, seq, &seed);
        check_numbered(crew, &o, &s);
    }
    glm53_crew_stats stats;
    glm53_crew_describe(crew, &stats);
    CHECK(stats.num_parks > 0);
    nanosleep(&pause, NULL);
    int32_t none[4] = {0, 0, 0, 0};
    memcpy(cell_of(&o, seq) + GLM53_MAIL_LAYER, none, sizeof none);
    glm53_mail_store(cell_of(&o, seq), GLM53_MAIL_POSTED, seq); /* nobody rings */
    CHECK(glm53_crew_wait(crew, seq, LONG_MS) == GLM53_OK);
    glm53_crew_describe(crew, &stats);
    CHECK(stats.num_empty == 1);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

static void await_parks(glm53_crew *crew, int64_t num_parks) {
    const struct timespec pause = {.tv_nsec = 1000000};
    glm53_crew_stats stats;
    for (glm53_crew_describe(crew, &stats); stats.num_parks < num_parks; glm53_crew_describe(crew, &stats)) {
        nanosleep(&pause, NULL);
    }
}

/* The bell rouses the lead and its workers; without a job they park again, and still compute the next one. */
static void test_bell_without_a_job_does_no_harm(void) {
    office o = open_office(0);
    uint32_t seed = 3;
    glm53_crew_config config = configure(&o);
    config.num_threads = 3;
    config.poll_us = 0;
    config.clamp = GLM53_CLAMP_ACTIVATION;
    config.limit = 2.0f;
    glm53_crew *crew = hire(&config);
    glm53_pool *pool = make_pool(1, GLM53_ISA_AUTO);
    for (int32_t round = 1; round <= 5; round++) {
        await_parks(crew, round);
        glm53_crew_ring(crew);
    }
    await_parks(crew, 6);
    check_against_pool(crew, &o, pool, 1, config.precision, &seed);
    glm53_pool_destroy(pool);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

/* ---- errands ---- */

enum { ERRAND_ROWS = 40 };

/* Of more rows than the mailbox holds, and as the pool computes it. */
static void check_errand(glm53_crew *crew, const office *o, glm53_pool *pool, int32_t layer, uint32_t *seed) {
    int32_t rows = 1 + (int32_t)(next_random(seed) % ERRAND_ROWS);
    float *x = random_floats(seed, (size_t)rows * HIDDEN),
          *weights = random_floats(seed, (size_t)rows * PICKS);
    int32_t picks[ERRAND_ROWS * PICKS];
    for (int32_t i = 0; i < rows * PICKS; i++) picks[i] = (int32_t)(next_random(seed) % (EXPERTS + 1)) - 1;
    float expected[ERRAND_ROWS * HIDDEN], found[ERRAND_ROWS * HIDDEN];
    glm53_expert_job job = {.table = o->table + layer * EXPERTS, .x = x, .picks = picks, .weights = weights};
    job.y = expected;
    job.num_experts = EXPERTS;
    job.rows = rows;
    job.num_picks = PICKS;
    job.precision = GLM53_FAST16;
    job.clamp = GLM53_CLAMP_ACTIVATION;
    job.limit = 2.0f;
    CHECK(glm53_experts(pool, &job) == GLM53_OK);
    glm53_expert_job errand = {.x = x, .picks = picks, .weights = weights, .y = found};
    errand.rows = rows;
    errand.num_picks = PICKS;
    CHECK(glm53_crew_begin(crew, layer, &errand) == GLM53_OK);
    CHECK(glm53_crew_begin(crew, layer, &errand) == GLM53_BUSY);
    int64_t elapsed_ns = 0;
    CHECK(glm53_crew_finish(crew, &elapsed_ns) == GLM53_OK && elapsed_ns > 0);
    CHECK(memcmp(found, expected, (size_t)rows * HIDDEN * sizeof(float)) == 0);
    free(x);
    free(weights);
}

static void test_errands_between_mail_are_those_of_the_kernels(void) {
    office o = open_office(7);
    uint32_t seed = 23;
    glm53_crew_config config = configure(&o);
    config.precision = GLM53_FAST16;
    config.clamp = GLM53_CLAMP_ACTIVATION;
    config.limit = 2.0f;
    glm53_crew *crew = hire(&config);
    glm53_pool *pool = make_pool(1, GLM53_ISA_AUTO);
    for (int32_t i = 0; i < 60; i++) {
        check_errand(crew, &o, pool, i % LAYERS, &seed);
        if (i % 3 == 0) check_against_pool(crew, &o, pool, i % LAYERS, GLM53_FAST16, &seed);
        if (i % 20 == 7)
            nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL); /* longer than poll_us: it parks */
    }
    glm53_crew_stats stats;
    CHECK(glm53_crew_describe(crew, &stats) == GLM53_OK && stats.num_jobs == 20);
    glm53_pool_destroy(pool);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

static void test_impossible_errands_are_refused(void) {
    office o = open_office(0);
    glm53_crew_config config = configure(&o);
    glm53_crew *crew = hire(&config);
    float x[HIDDEN] = {0}, y[HIDDEN], weight = 1.0f;
    int32_t pick = EXPERTS;
    glm53_expert_job errand = {.x = x, .picks = &pick, .weights = &weight, .y = y, .rows = 1, .num_picks = 1};
    CHECK(glm53_crew_finish(crew, NULL) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_crew_begin(crew, LAYERS, &errand) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_crew_begin(crew, 0, NULL) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_crew_begin(crew, 0, &errand) == GLM53_OK);
    CHECK(glm53_crew_finish(crew, NULL) == GLM53_BAD_PICK);
    CHECK(glm53_crew_check(crew) == GLM53_OK); /* it is told to who waits, and is no fault of the crew */
    pick = 0;
    CHECK(glm53_crew_begin(crew, 0, &errand) == GLM53_OK);
    CHECK(glm53_crew_finish(crew, NULL) == GLM53_OK);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

/* ---- faults ---- */

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool is_open;
} gate;

static int32_t wait_at_gate(void *context, const glm53_expert_job *job) {
    (void)job;
    gate *g = context;
    pthread_mutex_lock(&g->mutex);
    while (!g->is_open) pthread_cond_wait(&g->changed, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
    return GLM53_OK;
}

static void open_gate(gate *g) {
    pthread_mutex_lock(&g->mutex);
    g->is_open = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

static int32_t end_thread(void *context, const glm53_expert_job *job) {
    (void)context;
    (void)job;
    pthread_exit(NULL);
}

static void expect_stall(glm53_crew *crew) {
    float x[ROWS * HIDDEN] = {0}, weights[PICKS] = {1, 1, 1};
    int32_t picks[PICKS] = {0, 1, 2};
    glm53_mail mail = {x, picks, weights, 0, 1, PICKS, 0, 0};
    uint32_t first, second, third;
    double begin_s = now_s();
    CHECK(glm53_crew_post(crew, &mail, &first) == GLM53_OK);
    CHECK(glm53_crew_post(crew, &mail, &second) == GLM53_OK);
    CHECK(glm53_crew_wait(crew, first, LONG_MS) == GLM53_STALLED);
    CHECK(now_s() - begin_s < 2.0);
    CHECK(glm53_crew_wait(crew, second, LONG_MS) == GLM53_STALLED);
    CHECK(glm53_crew_post(crew, &mail, &third) == GLM53_OK); /* a step on its way when the crew failed */
    CHECK(glm53_crew_wait(crew, third, LONG_MS) == GLM53_STALLED);
    CHECK(now_s() - begin_s < 2.0);
    CHECK(glm53_crew_check(crew) == GLM53_STALLED);
    glm53_crew_stats stats;
    glm53_crew_describe(crew, &stats);
    CHECK(stats.is_failed && stats.num_jobs == 0);
}

static void test_stalled_worker_is_an_error(void) {
    office o = open_office(0);
    gate g = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    glm53_crew_config config = configure(&o);
    config.compute = wait_at_gate;
    config.context = &g;
    config.deadline_ms = DEADLINE_MS;
    glm53_crew *crew = hire(&config);
    expect_stall(crew);
    open_gate(&g); /* the lead wakes late and must keep silent */
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

/* An errand has ten deadlines, and mail behind it as long. */
static void test_stalled_errand_is_an_error(void) {
    office o = open_office(0);
    gate g = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    glm53_crew_config config = configure(&o);
    config.compute = wait_at_gate;
    config.context = &g;
    config.deadline_ms = 40;
    glm53_crew *crew = hire(&config);
    float x[HIDDEN] = {0}, y[HIDDEN], weight = 1.0f;
    int32_t pick = 0;
    glm53_expert_job errand = {.x = x, .picks = &pick, .weights = &weight, .y = y, .rows = 1, .num_picks = 1};
    double begin_s = now_s();
    CHECK(glm53_crew_begin(crew, 0, &errand) == GLM53_OK);
    while (now_s() - begin_s < 0.02) sched_yield(); /* the lead has it */
    glm53_mail mail = {x, &pick, &weight, 0, 1, 1, 0, 0};
    uint32_t seq;
    CHECK(glm53_crew_post(crew, &mail, &seq) == GLM53_OK);
    CHECK(glm53_crew_finish(crew, NULL) == GLM53_STALLED);
    CHECK(now_s() - begin_s >= 0.4 && now_s() - begin_s < 2.0);
    CHECK(glm53_crew_wait(crew, seq, LONG_MS) == GLM53_STALLED);
    CHECK(glm53_crew_begin(crew, 0, &errand) == GLM53_STALLED);
    CHECK(glm53_crew_check(crew) == GLM53_STALLED);
    open_gate(&g);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

static void test_dead_worker_is_an_error(void) {
    office o = open_office(0);
    glm53_crew_config config = configure(&o);
    config.compute = end_thread;
    config.deadline_ms = DEADLINE_MS;
    glm53_crew *crew = hire(&config);
    expect_stall(crew);
    CHECK(glm53_crew_destroy(crew) == GLM53_OK);
    close_office(&o);
}

#if !defined(__SANITIZE_THREAD__) /* which reports a thread that is never joined */
static void test_ending_a_crew_that_hangs_returns(void) {
    static office o; /* stays in use, as the header says */
    static gate g = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    static glm53_crew *crew;
    o = open_office(0);
    glm53_crew_config config = configure(&o);
    config.compute = wait_at_gate;
    config.context = &g;
    config.deadline_ms = DEADLINE_MS;
    crew = hire(&config);
    expect_stall(crew);
    double begin_s = now_s();
    CHECK(glm53_crew_destroy(crew) == GLM53_STALLED);
    CHECK(now_s() - begin_s < 4.0);
    open_gate(&g);
}
#endif

static void test_impossible_crews_are_refused(void) {
    office o = open_office(0);
    glm53_crew *crew;
    glm53_crew_config config = configure(&o);
    config.deadline_ms = 0;
    CHECK(glm53_crew_create(&config, &crew) == GLM53_BAD_ARGUMENT && !crew);
    config = configure(&o);
    config.isa = GLM53_ISA_AMX + 1;
    CHECK(glm53_crew_create(&config, &crew) == GLM53_BAD_ARGUMENT && !crew);
    memset(o.mailbox, 0, 4);
    config = configure(&o);
    CHECK(glm53_crew_create(&config, &crew) == GLM53_BAD_ARGUMENT && !crew);
    glm53_mailbox_shape odd = {3, 1, 1, HIDDEN, 0};
    CHECK(glm53_mailbox_init(o.mailbox, &odd) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_crew_destroy(NULL) == GLM53_OK);
    close_office(&o);
}

static void test_regions_fall_back_and_lock(void) {
    for (int32_t pages = GLM53_PAGES_PLAIN; pages <= GLM53_PAGES_HUGE; pages++) {
        glm53_region region;
        int32_t error;
        CHECK(glm53_region_map(3 << 20, pages, &region) == GLM53_OK);
        CHECK(region.pages <= pages && (uintptr_t)region.base % (2 << 20) == 0);
        CHECK(region.pages == pages || region.refusal != 0);
        memset(region.base, 1, (size_t)region.num_bytes);
        CHECK(glm53_region_lock(&region, &error) == GLM53_OK || error != 0);
        glm53_region_unmap(&region);
        CHECK(!region.base);
        glm53_region_unmap(&region);
    }
    glm53_region region;
    CHECK(glm53_region_map(INT64_MAX / 4, GLM53_PAGES_PLAIN, &region) == GLM53_NO_MEMORY && region.refusal);
    CHECK(glm53_region_map(0, GLM53_PAGES_PLAIN, &region) == GLM53_BAD_ARGUMENT);
}

int main(int argc, char **argv) {
    test_every_job_is_answered_once(argc > 1 ? atoll(argv[1]) : 20000);
    test_full_mailbox_refuses();
    test_partial_sums_are_those_of_the_kernels(GLM53_EXACT32);
    test_partial_sums_are_those_of_the_kernels(GLM53_FAST16);
    test_device_posts_f16_rows();
    test_malformed_jobs_are_answered_with_an_error();
    test_parked_crew_wakes_and_missed_doorbell_loses_nothing();
    test_bell_without_a_job_does_no_harm();
    test_errands_between_mail_are_those_of_the_kernels();
    test_impossible_errands_are_refused();
    test_stalled_worker_is_an_error();
    test_stalled_errand_is_an_error();
    test_dead_worker_is_an_error();
#if !defined(__SANITIZE_THREAD__)
    test_ending_a_crew_that_hangs_returns();
#endif
    test_impossible_crews_are_refused();
    test_regions_fall_back_and_lock();
    printf("mailbox: ok\n");
    return 0;
}
