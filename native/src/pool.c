/* A pool of worker threads that park between jobs.
 *
 * A job is announced by a new value of `generation`. Workers spin for a short while before they sleep, so
 * that the steps of a model follow each other without a system call. Inside a job, `barrier` and `await` spin
 * likewise. What different threads write lies on cache lines of its own, pairs of them, since some CPUs fetch
 * two lines at once. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "internal.h"

/* About 20 microseconds at a pause of 40 cycles: longer than the gap between two kernels of a layer, shorter
 * than a scheduler tick, so that an idle pool costs nothing. */
enum { SPIN_LIMIT = 2000 };

/* A pool whose workers are to poll between jobs does so within them as well, for at most so long: far longer
 * than a task, so that who waits still is about to lose a processor to somebody else. */
static const int64_t MOST_WAIT_NS = 200000;

/* Multiply-adds below which one thread is done before sleeping workers have woken: some 10 microseconds. */
enum { SHARED_WORK = 1 << 16 };

enum { MOST_BITS_X2 = 16 };

/* A counter on which threads wait: spin first, then sleep. */
typedef struct {
    atomic_uint value;
    atomic_int num_sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} event_counter;

typedef struct {
    glm53_pool *pool;
    pthread_t thread;
    int32_t index;
} worker;

struct glm53_pool {
    const glm53_tier *tier;
    int32_t num_threads;
    int32_t num_active; /* threads of the running job: all of them or the caller */
    int32_t num_pinned;
    int32_t num_started;
    int64_t spin_ns; /* beyond SPIN_LIMIT rounds, for workers without a job */
    int64_t wait_ns; /* likewise, within a job */
    worker *workers; /* [1, num_threads); entry 0 is the caller's */
    glm53_job_fn job;
    void *context;
    bool is_closing;
    atomic_flag is_busy;
    void *scratch;
    size_t scratch_bytes;
    _Alignas(64) char plans[MOST_BITS_X2 + 1][GLM53_PLAN_BYTES];
    _Alignas(128) event_counter generation;
    _Alignas(128) event_counter phase; /* who sleeps within a job, sleeps here */
    _Alignas(128) atomic_int num_arrived;
    _Alignas(128) atomic_int num_finished; /* workers that are done with the job */
    _Alignas(128) atomic_llong next_task;
};

static void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void counter_init(event_counter *counter) {
    atomic_init(&counter->value, 0);
    atomic_init(&counter->num_sleepers, 0);
    pthread_mutex_init(&counter->mutex, NULL);
    pthread_cond_init(&counter->changed, NULL);
}

static void counter_destroy(event_counter *counter) {
    pthread_cond_destroy(&counter->changed);
    pthread_mutex_destroy(&counter->mutex);
}

/* No wake-up is lost: a sleeper raises num_sleepers before it looks at what it waits for, the other thread
 * changes that before it looks at num_sleepers, and both orders are sequentially consistent. */
static void wake_sleepers(event_counter *counter) {
    if (atomic_load(&counter->num_sleepers) == 0) return;
    pthread_mutex_lock(&counter->mutex);
    pthread_cond_broadcast(&counter->changed);
    pthread_mutex_unlock(&counter->mutex);
}

static void counter_advance(event_counter *counter) {
    atomic_fetch_add(&counter->value, 1);
    wake_sleepers(counter);
}

static bool counter_spin_past(event_counter *counter, unsigned seen) {
    for (int32_t i = 0; i < SPIN_LIMIT; i++) {
        if (atomic_load_explicit(&counter->value, memory_order_acquire) != seen) return true;
        cpu_relax();
    }
    return false;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* spin_ns: how long to poll before sleeping, at least SPIN_LIMIT rounds. */
static void counter_wait_past(event_counter *counter, unsigned seen, int64_t spin_ns) {
    if (counter_spin_past(counter, seen)) return;
    for (int64_t end = spin_ns > 0 ? now_ns() + spin_ns : 0; spin_ns > 0 && now_ns() < end;) {
        if (counter_spin_past(counter, seen)) return;
    }
    pthread_mutex_lock(&counter->mutex);
    atomic_fetch_add(&counter->num_sleepers, 1);
    while (atomic_load(&counter->value) == seen) pthread_cond_wait(&counter->changed, &counter->mutex);
    atomic_fetch_sub(&counter->num_sleepers, 1);
    pthread_mutex_unlock(&counter->mutex);
}

void glm53_pool_barrier(glm53_pool *pool) {
    unsigned seen = atomic_load(&pool->phase.value);
    if (atomic_fetch_add(&pool->num_arrived, 1) + 1 == pool->num_active) {
        atomic_store(&pool->num_arrived, 0);
        atomic_store(&pool->next_task, 0);
        counter_advance(&pool->phase);
    } else {
        counter_wait_past(&pool->phase, seen, pool->wait_ns);
    }
}

void glm53_pool_raise(glm53_pool *pool, atomic_int *count) {
    atomic_fetch_add(count, 1);
    wake_sleepers(&pool->phase);
}

static bool has_reached(atomic_int *count, int32_t target) {
    for (int32_t i = 0; i < SPIN_LIMIT; i++) {
        if (atomic_load_explicit(count, memory_order_acquire) >= target) return true;
        cpu_relax();
    }
    return false;
}

void glm53_pool_await(glm53_pool *pool, atomic_int *count, int32_t target) {
    if (has_reached(count, target)) return;
    for (int64_t end = now_ns() + pool->wait_ns; now_ns() < end;) {
        if (has_reached(count, target)) return;
    }
    event_counter *bed = &pool->phase;
    pthread_mutex_lock(&bed->mutex);
    atomic_fetch_add(&bed->num_sleepers, 1);
    while (atomic_load(count) < target) pthread_cond_wait(&bed->changed, &bed->mutex);
    atomic_fetch_sub(&bed->num_sleepers, 1);
    pthread_mutex_unlock(&bed->mutex);
}

int64_t glm53_pool_next(glm53_pool *pool) {
    return atomic_fetch_add_explicit(&pool->next_task, 1, memory_order_relaxed);
}

static void *worker_main(void *argument) {
    worker *self = argument;
    glm53_pool *pool = self->pool;
    for (unsigned seen = 0;; seen++) {
        counter_wait_past(&pool->generation, seen, pool->spin_ns);
        if (pool->is_closing) return NULL;
        pool->job(pool, pool->context, self->index);
        glm53_pool_raise(pool, &pool->num_finished);
    }
}

void glm53_pool_run(glm53_pool *pool, glm53_job_fn job, void *context, int64_t work) {
    bool is_shared = pool->num_threads > 1 && work >= SHARED_WORK;
    pool->num_active = is_shared ? pool->num_threads : 1;
    pool->job = job;
    pool->context = context;
    atomic_store(&pool->next_task, 0);
    atomic_store(&pool->num_finished, 0);
    if (is_shared) counter_advance(&pool->generation);
    job(pool, context, 0);
    glm53_pool_await(pool, &pool->num_finished, pool->num_active - 1);
}

static void do_nothing(glm53_pool *pool, void *context, int32_t thread) {
    (void)pool;
    (void)context;
    (void)thread;
}

void glm53_pool_rouse(glm53_pool *pool) { glm53_pool_run(pool, do_nothing, NULL, SHARED_WORK); }

bool glm53_pool_acquire(glm53_pool *pool) { return !atomic_flag_test_and_set(&pool->is_busy); }

void glm53_pool_release(glm53_pool *pool) { atomic_flag_clear(&pool->is_busy); }

const glm53_tier *glm53_pool_tier(const glm53_pool *pool) { return pool->tier; }

const void *glm53_pool_plan(const glm53_pool *pool, int32_t bits_x2) { return pool->plans[bits_x2]; }

static void make_plans(glm53_pool *pool) {
    for (int32_t bits_x2 = 2; pool->tier->plan && bits_x2 <= MOST_BITS_X2; bits_x2++) {
        pool->tier->plan(bits_x2, pool->plans[bits_x2]);
    }
}

int32_t glm53_pool_threads(const glm53_pool *pool) { return pool->num_threads; }

void *glm53_pool_scratch(glm53_pool *pool, size_t bytes) {
    if (bytes <= pool->scratch_bytes) return pool->scratch;
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    void *grown = aligned_alloc(64, rounded);
    if (!grown) return NULL;
    free(pool->scratch);
    pool->scratch = grown;
    pool->scratch_bytes = rounded;
    return grown;
}

static bool pin(pthread_t thread, int32_t cpu) {
#if defined(__linux__)
    cpu_set_t set;
    if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(thread, sizeof set, &set) == 0;
#else
    (void)thread;
    (void)cpu;
    return false;
#endif
}

static bool start_workers(glm53_pool *pool, const glm53_pool_config *config) {
    for (int32_t i = 1; i < pool->num_threads; i++) {
        worker *w = &pool->workers[i];
        w->pool = pool;
        w->index = i;
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) return false;
        pool->num_started++;
        if (config->cpus && pin(w->thread, config->cpus[i % config->num_cpus])) pool->num_pinned++;
    }
    return true;
}

int32_t glm53_pool_create(const glm53_pool_config *config, glm53_pool **out) {
    if (!out) return GLM53_BAD_ARGUMENT;
    *out = NULL;
    if (!config || config->num_threads < 1 || config->num_threads > 1024) return GLM53_BAD_ARGUMENT;
    if (config->isa < GLM53_ISA_AUTO || config->isa > GLM53_ISA_AMX) return GLM53_BAD_ARGUMENT;
    if (config->cpus && config->num_cpus < 1) return GLM53_BAD_ARGUMENT;
    if (config->spin_us < 0) return GLM53_BAD_ARGUMENT;
    const glm53_tier *tier = glm53_find_tier(config->isa);
    if (!tier) return GLM53_NO_ISA;
    glm53_pool *pool = aligned_alloc(128, sizeof *pool);
    if (!pool) return GLM53_NO_MEMORY;
    memset(pool, 0, sizeof *pool);
    pool->workers = calloc((size_t)config->num_threads, sizeof *pool->workers);
    if (!pool->workers) {
        free(pool);
        return GLM53_NO_MEMORY;
    }
    pool->tier = tier;
    make_plans(pool);
    pool->num_threads = config->num_threads;
    pool->spin_ns = (int64_t)config->spin_us * 1000;
    pool->wait_ns = pool->spin_ns < MOST_WAIT_NS ? pool->spin_ns : MOST_WAIT_NS;
    atomic_flag_clear(&pool->is_busy);
    counter_init(&pool->generation);
    counter_init(&pool->phase);
    if (!start_workers(pool, config)) {
        glm53_pool_destroy(pool);
        return GLM53_NO_THREAD;
    }
    *out = pool;
    return GLM53_OK;
}

void glm53_pool_destroy(glm53_pool *pool) {
    if (!pool) return;
    pool->is_closing = true;
    counter_advance(&pool->generation);
    for (int32_t i = 1; i <= pool->num_started; i++) pthread_join(pool->workers[i].thread, NULL);
    counter_destroy(&pool->generation);
    counter_destroy(&pool->phase);
    free(pool->workers);
    free(pool->scratch);
    free(pool);
}

int32_t glm53_pool_describe(const glm53_pool *pool, glm53_pool_info *info) {
    if (!pool || !info) return GLM53_BAD_ARGUMENT;
    info->num_threads = pool->num_threads;
    info->isa = pool->tier->isa;
    info->num_pinned = pool->num_pinned;
    info->scratch_bytes = (int64_t)pool->scratch_bytes;
    return GLM53_OK;
}
