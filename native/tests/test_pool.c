/* The pool's hand-over between threads: run it under TSan. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "check.h"

enum { IN = 512, OUT = 256, ROWS = 2 };

typedef struct {
    glm53_matrix matrix;
    float *x;
    float *expected; /* (ROWS, OUT) */
} problem;

static problem make_problem(void) {
    uint32_t seed = 1;
    problem p = {.matrix = random_matrix(&seed, IN, OUT, 6, GLM53_CODEBOOK_MUL1)};
    p.x = random_floats(&seed, ROWS * IN);
    p.expected = nan_floats(ROWS * OUT);
    glm53_pool *pool = make_pool(1, GLM53_ISA_AUTO);
    CHECK(glm53_linear(pool, &p.matrix, p.x, ROWS, GLM53_EXACT32, p.expected) == GLM53_OK);
    glm53_pool_destroy(pool);
    return p;
}

static void check_linear(glm53_pool *pool, const problem *p) {
    float y[ROWS * OUT];
    for (int32_t i = 0; i < ROWS * OUT; i++) y[i] = NAN;
    CHECK(glm53_linear(pool, &p->matrix, p->x, ROWS, GLM53_EXACT32, y) == GLM53_OK);
    CHECK(memcmp(y, p->expected, sizeof y) == 0);
    CHECK(glm53_hadamard(pool, p->x, 1, 128, y) == GLM53_OK); /* so small that the workers are left alone */
}

static void test_many_jobs(const problem *p) {
    for (int32_t num_threads = 1; num_threads <= 5; num_threads++) {
        glm53_pool *pool = make_pool(num_threads, GLM53_ISA_AUTO);
        for (int32_t i = 0; i < 100; i++) check_linear(pool, p);
        glm53_pool_destroy(pool);
    }
}

static void test_pools_come_and_go(void) {
    for (int32_t i = 0; i < 50; i++) glm53_pool_destroy(make_pool(1 + i % 5, GLM53_ISA_AUTO));
}

/* Workers spin for microseconds, so after a pause of milliseconds a job finds them asleep. */
static void test_sleeping_workers_wake(const problem *p) {
    glm53_pool *pool = make_pool(3, GLM53_ISA_AUTO);
    const struct timespec pause = {.tv_nsec = 3000000};
    for (int32_t i = 0; i < 30; i++) {
        nanosleep(&pause, NULL);
        check_linear(pool, p);
    }
    glm53_pool_destroy(pool);
}

static void *own_pool_main(void *argument) {
    glm53_pool *pool = make_pool(2, GLM53_ISA_AUTO);
    for (int32_t i = 0; i < 50; i++) check_linear(pool, argument);
    glm53_pool_destroy(pool);
    return NULL;
}

static void test_pools_are_independent(problem *p) {
    pthread_t threads[2];
    for (int32_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, own_pool_main, p) == 0);
    for (int32_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

typedef struct {
    glm53_pool *pool;
    const problem *p;
    atomic_int num_done;
} shared_pool;

static void *shared_pool_main(void *argument) {
    shared_pool *shared = argument;
    float y[ROWS * OUT];
    for (int32_t done = 0; done < 50;) {
        const problem *p = shared->p;
        int32_t status = glm53_linear(shared->pool, &p->matrix, p->x, ROWS, GLM53_EXACT32, y);
        CHECK(status == GLM53_OK || status == GLM53_BUSY);
        if (status != GLM53_OK) continue;
        CHECK(memcmp(y, p->expected, sizeof y) == 0);
        done++;
    }
    atomic_fetch_add(&shared->num_done, 1);
    return NULL;
}

/* Two callers of one pool: one of them is told that it is busy, and no result is mixed up. */
static void test_callers_exclude_each_other(const problem *p) {
    shared_pool shared = {.pool = make_pool(2, GLM53_ISA_AUTO), .p = p};
    pthread_t threads[2];
    for (int32_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, shared_pool_main, &shared) == 0);
    for (int32_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CHECK(atomic_load(&shared.num_done) == 2);
    glm53_pool_destroy(shared.pool);
}

enum { EXPERTS = 4, TOKENS = 12, PICKS = 3, REPEATS = 4 };

/* One thread and four give the same bits, whether a job goes by phases or by tasks that wait. */
static void check_experts(int32_t hidden, int32_t intermediate, int32_t most_rows) {
    uint32_t seed = 9;
    glm53_expert table[EXPERTS];
    for (int32_t e = 0; e < EXPERTS; e++) {
        table[e].gate = random_matrix(&seed, hidden, intermediate, 6, GLM53_CODEBOOK_MUL1);
        table[e].up = random_matrix(&seed, hidden, intermediate, 6, GLM53_CODEBOOK_MUL1);
        table[e].down = random_matrix(&seed, intermediate, hidden, 6, GLM53_CODEBOOK_MUL1);
    }
    size_t width = (size_t)hidden;
    float *x = random_floats(&seed, TOKENS * width), *weights = random_floats(&seed, TOKENS * PICKS);
    int32_t picks[TOKENS * PICKS];
    for (int32_t i = 0; i < TOKENS * PICKS; i++) picks[i] = (int32_t)(next_random(&seed) % (EXPERTS + 1)) - 1;
    float *expected = nan_floats(TOKENS * width), *y = items(TOKENS * width, sizeof *y);
    glm53_pool *one = make_pool(1, GLM53_ISA_AUTO), *four = make_pool(4, GLM53_ISA_AUTO);
    glm53_expert_job job = {
        .table = table, .x = x, .picks = picks, .weights = weights, .num_experts = EXPERTS};
    job.num_picks = PICKS;
    job.precision = GLM53_FAST16;
    for (job.rows = 1; job.rows <= most_rows; job.rows++) {
        job.y = expected;
        CHECK(glm53_experts(one, &job) == GLM53_OK);
        job.y = y;
        for (int32_t i = 0; i < REPEATS; i++) {
            memset(y, 0xff, TOKENS * width * sizeof *y);
            CHECK(glm53_experts(four, &job) == GLM53_OK);
            CHECK(memcmp(y, expected, (size_t)job.rows * width * sizeof *y) == 0);
        }
    }
    glm53_pool_destroy(one);
    glm53_pool_destroy(four);
    for (int32_t e = 0; e < EXPERTS; e++) {
        free_matrix(&table[e].gate);
        free_matrix(&table[e].up);
        free_matrix(&table[e].down);
    }
    float *buffers[] = {x, weights, expected, y};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
}

static void test_experts(void) {
    check_experts(128, 128, TOKENS);
    check_experts(384, 1152, 3); /* stages of 4, 4 and 1 blocks, columns in unequal parts */
}

int main(void) {
    problem p = make_problem();
    test_many_jobs(&p);
    test_pools_come_and_go();
    test_sleeping_workers_wake(&p);
    test_pools_are_independent(&p);
    test_callers_exclude_each_other(&p);
    test_experts();
    free_matrix(&p.matrix);
    free(p.x);
    free(p.expected);
    printf("pool: ok\n");
    return 0;
}
