/* The threads that answer a mailbox: a lead that polls it, the lead's pool, and a watchdog.
 *
 *   lead      AWAKE   posted == seq -> compute, done = seq, next seq
 *             AWAKE   nothing for poll_us -> PARKED
 *             PARKED  doorbell, or a post seen by the look ten times a second -> AWAKE
 *   crew      RUNNING watchdog sees one job unanswered for deadline_ms -> FAILED
 *             RUNNING or FAILED  destroy -> CLOSING
 *
 * Only the lead writes next_seq and, while RUNNING, answers; only the watchdog answers once FAILED. A lead
 * that wakes from a stall finds the state changed and ends without a word. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "mailbox.h"

enum { RUNNING = 0, FAILED = 1, CLOSING = 2 };

/* Rounds between two looks at the clock: about 2 microseconds at a pause of 40 cycles. */
enum { ROUNDS = 128 };
static const int64_t PARKED_LOOK_NS = 100000000;
static const int64_t MS_NS = 1000000;

/* A mutex with a condition on the monotonic clock, for threads that sleep. */
typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    atomic_int num_sleepers;
} bed;

struct glm53_crew {
    glm53_crew_config config;
    glm53_mailbox_shape shape;
    glm53_mailbox_layout layout;
    glm53_pool *pool;
    float *rows; /* (max_rows, hidden): f16 rows as float32 */
    pthread_t lead, watchdog;
    bool has_lead, has_watchdog;
    uint32_t next_post; /* the producer's */
    atomic_int state;
    atomic_int first_error;
    _Alignas(64) atomic_uint next_seq;
    _Alignas(64) atomic_uint bell;
    bed lead_bed, done_bed, watchdog_bed;
    atomic_llong num_jobs, num_empty, num_picks, num_experts, busy_ns, num_parks;
    int32_t num_pinned;
};

static void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void bed_init(bed *b) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&b->mutex, NULL);
    pthread_cond_init(&b->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    atomic_init(&b->num_sleepers, 0);
}

static void bed_destroy(bed *b) {
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->mutex);
}

/* Whoever changes what a sleeper waits for calls this afterwards. No wake-up is lost: the sleeper counts
 * itself before it looks, the other one changes before it looks at the count, and all four accesses are
 * sequentially consistent. True if there was a sleeper. */
static bool bed_wake(bed *b) {
    if (atomic_load(&b->num_sleepers) == 0) return false;
    pthread_mutex_lock(&b->mutex);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
    return true;
}

static void bed_sleep_until(bed *b, int64_t end_ns) {
    struct timespec end = {.tv_sec = end_ns / 1000000000, .tv_nsec = end_ns % 1000000000};
    pthread_cond_timedwait(&b->changed, &b->mutex, &end);
}

static uint8_t *cell_of(const glm53_crew *crew, uint32_t seq) {
    size_t i = seq % (uint32_t)crew->shape.num_cells;
    return (uint8_t *)crew->config.mailbox + GLM53_MAIL_HEADER_BYTES + i * (size_t)crew->layout.cell_bytes;
}

static bool is_running(const glm53_crew *crew) { return atomic_load(&crew->state) == RUNNING; }

static bool is_posted(const glm53_crew *crew, uint32_t seq) {
    return __atomic_load_n(glm53_mail_word(cell_of(crew, seq), GLM53_MAIL_POSTED), __ATOMIC_SEQ_CST) == seq;
}

static bool is_done(const glm53_crew *crew, uint32_t seq) {
    return __atomic_load_n(glm53_mail_word(cell_of(crew, seq), GLM53_MAIL_DONE), __ATOMIC_SEQ_CST) == seq;
}

static void note_error(glm53_crew *crew, int32_t status) {
    int none = GLM53_OK;
    if (status != GLM53_OK) atomic_compare_exchange_strong(&crew->first_error, &none, status);
}

/* ---- the lead ---- */

static void park(glm53_crew *crew, uint32_t seq, unsigned bell) {
    bed *b = &crew->lead_bed;
    atomic_fetch_add(&crew->num_parks, 1);
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->num_sleepers, 1);
    while (atomic_load(&crew->bell) == bell && !is_posted(crew, seq) && is_running(crew)) {
        bed_sleep_until(b, now_ns() + PARKED_LOOK_NS);
    }
    atomic_fetch_sub(&b->num_sleepers, 1);
    pthread_mutex_unlock(&b->mutex);
}

/* False when the crew no longer runs. */
static bool await_post(glm53_crew *crew, uint32_t seq) {
    uint8_t *cell = cell_of(crew, seq);
    unsigned bell = atomic_load(&crew->bell);
    for (int64_t since = now_ns();;) {
        for (int32_t i = 0; i < ROUNDS; i++) {
            if (glm53_mail_load(cell, GLM53_MAIL_POSTED) == seq) return is_running(crew);
            cpu_relax();
        }
        if (!is_running(crew)) return false;
        if (now_ns() - since < (int64_t)crew->config.poll_us * 1000) continue;
        park(crew, seq, bell);
        bell = atomic_load(&crew->bell);
        since = now_ns();
    }
}

/* Read a job out of its cell. The producer may be another device, so nothing in it is trusted. */
static int32_t read_job(glm53_crew *crew, uint8_t *cell, glm53_expert_job *job) {
    int32_t layer, kind;
    memcpy(&layer, cell + GLM53_MAIL_LAYER, sizeof layer);
    memcpy(&job->rows, cell + GLM53_MAIL_ROWS, sizeof job->rows);
    memcpy(&job->num_picks, cell + GLM53_MAIL_NUM_PICKS, sizeof job->num_picks);
    memcpy(&kind, cell + GLM53_MAIL_X_KIND, sizeof kind);
    if (job->rows == 0) return GLM53_OK;
    if (job->rows < 0 || job->rows > crew->shape.max_rows) return GLM53_BAD_ARGUMENT;
    if (job->num_picks < 1 || job->num_picks > crew->shape.max_picks) return GLM53_BAD_ARGUMENT;
    if (layer < 0 || layer >= crew->config.num_layers) return GLM53_BAD_ARGUMENT;
    if (kind != GLM53_X_F32 && kind != GLM53_X_F16) return GLM53_BAD_ARGUMENT;
    job->table = crew->config.table + (size_t)layer * (size_t)crew->config.num_experts;
    job->num_experts = crew->config.num_experts;
    job->precision = crew->config.precision;
    job->clamp = crew->config.clamp;
    job->limit = crew->config.limit;
    job->picks = (const int32_t *)(const void *)(cell + GLM53_MAIL_PICKS);
    job->weights = (const float *)(const void *)(cell + crew->layout.weights_offset);
    job->y = (float *)(void *)(cell + crew->layout.y_offset);
    job->x = (const float *)(const void *)(cell + crew->layout.x_offset);
    if (kind == GLM53_X_F16) {
        const uint16_t *halves = (const uint16_t *)(const void *)job->x;
        size_t count = (size_t)job->rows * (size_t)crew->shape.hidden;
        for (size_t i = 0; i < count; i++) crew->rows[i] = glm53_f16_to_f32(halves[i]);
        job->x = crew->rows;
    }
    return GLM53_OK;
}

typedef struct {
    int32_t picks, experts;
} pick_count;

/* At most 8 x 64 picks, mostly 8 or fewer. */
static pick_count count_picks(const glm53_expert_job *job) {
    pick_count count = {0};
    int32_t num = job->rows * job->num_picks;
    for (int32_t i = 0; i < num; i++) {
        if (job->picks[i] < 0) continue;
        int32_t j = 0;
        while (job->picks[j] != job->picks[i]) j++;
        count.picks++;
        count.experts += j == i;
    }
    return count;
}

static int32_t compute(glm53_crew *crew, const glm53_expert_job *job) {
    if (crew->config.compute) return crew->config.compute(crew->config.context, job);
    return glm53_experts(crew->pool, job);
}

/* False if the crew stopped meanwhile: then the job is not the lead's to answer any more. */
static bool serve(glm53_crew *crew, uint32_t seq) {
    uint8_t *cell = cell_of(crew, seq);
    int64_t begin_ns = now_ns();
    glm53_expert_job job = {0};
    pick_count count = {0};
    int32_t status = read_job(crew, cell, &job);
    if (status == GLM53_OK && job.rows > 0) {
        count = count_picks(&job);
        if (count.picks > 0) {
            status = compute(crew, &job);
        } else {
            memset(job.y, 0, (size_t)job.rows * (size_t)crew->shape.hidden * sizeof(float));
        }
    }
    int64_t elapsed_ns = now_ns() - begin_ns;
    if (!is_running(crew)) return false;
    atomic_fetch_add(&crew->num_jobs, 1);
    atomic_fetch_add(&crew->num_empty, count.picks == 0);
    atomic_fetch_add(&crew->num_picks, count.picks);
    atomic_fetch_add(&crew->num_experts, count.experts);
    if (count.picks) atomic_fetch_add(&crew->busy_ns, elapsed_ns);
    note_error(crew, status);
    uint32_t stored_ns = elapsed_ns > (int64_t)UINT32_MAX ? UINT32_MAX : (uint32_t)elapsed_ns;
    memcpy(cell + GLM53_MAIL_STATUS, &status, sizeof status);
    memcpy(cell + GLM53_MAIL_NUM_EXPERTS, &count.experts, sizeof count.experts);
    memcpy(cell + GLM53_MAIL_ELAPSED_NS, &stored_ns, sizeof stored_ns);
    glm53_mail_store(cell, GLM53_MAIL_DONE, seq);
    /* A kernel may have put the sleeper on this very CPU, where a polling lead would keep it waiting for the
     * whole of poll_us: seen with unpinned threads on two busy cores. */
    if (bed_wake(&crew->done_bed)) sched_yield();
    return true;
}

static void *lead_main(void *argument) {
    glm53_crew *crew = argument;
    uint32_t seq = atomic_load(&crew->next_seq);
    while (await_post(crew, seq) && serve(crew, seq)) atomic_store(&crew->next_seq, ++seq);
    return NULL;
}

/* ---- the watchdog ---- */

/* Answer what is posted, so that nobody waits for ever. */
static uint32_t answer_stalled(glm53_crew *crew, uint32_t seq) {
    for (; is_posted(crew, seq); seq++) {
        if (is_done(crew, seq)) continue;
        uint8_t *cell = cell_of(crew, seq);
        __atomic_store_n(glm53_mail_word(cell, GLM53_MAIL_STATUS), GLM53_STALLED, __ATOMIC_RELAXED);
        glm53_mail_store(cell, GLM53_MAIL_DONE, seq);
    }
    bed_wake(&crew->done_bed);
    return seq;
}

static void *watchdog_main(void *argument) {
    glm53_crew *crew = argument;
    int64_t deadline_ns = crew->config.deadline_ms * MS_NS, tick_ns = deadline_ns / 8;
    uint32_t seq = atomic_load(&crew->next_seq), answered = 0;
    int64_t since = now_ns();
    bed *b = &crew->watchdog_bed;
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->num_sleepers, 1);
    while (atomic_load(&crew->state) != CLOSING) {
        bed_sleep_until(b, now_ns() + (tick_ns > MS_NS ? tick_ns : MS_NS));
        if (atomic_load(&crew->state) == FAILED) {
            answered = answer_stalled(crew, answered);
            continue;
        }
        uint32_t current = atomic_load(&crew->next_seq);
        if (current != seq || !is_posted(crew, seq) || is_done(crew, seq)) {
            seq = current;
            since = now_ns();
            continue;
        }
        int running = RUNNING;
        if (now_ns() - since < deadline_ns) continue;
        if (!atomic_compare_exchange_strong(&crew->state, &running, FAILED)) continue;
        note_error(crew, GLM53_STALLED);
        answered = answer_stalled(crew, seq);
        bed_wake(&crew->lead_bed);
    }
    atomic_fetch_sub(&b->num_sleepers, 1);
    pthread_mutex_unlock(&b->mutex);
    return NULL;
}

/* ---- making and ending ---- */

static bool is_complete(const glm53_crew_config *config) {
    return config && config->mailbox && config->table && config->num_layers >= 1 &&
           config->num_experts >= 1 && config->num_threads >= 1 && config->poll_us >= 0 &&
           config->deadline_ms >= 1 && (!config->cpus || config->num_cpus >= 1);
}

static bool pin_lead(glm53_crew *crew, int32_t cpu) {
#if defined(__linux__)
    cpu_set_t set;
    if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(crew->lead, sizeof set, &set) == 0;
#else
    (void)crew;
    (void)cpu;
    return false;
#endif
}

static int32_t start_threads(glm53_crew *crew) {
    const glm53_crew_config *config = &crew->config;
    glm53_pool_config pool = {.num_threads = config->num_threads, .isa = config->isa};
    pool.cpus = config->cpus;
    pool.num_cpus = config->num_cpus;
    pool.spin_us = config->poll_us;
    int32_t status = glm53_pool_create(&pool, &crew->pool);
    if (status != GLM53_OK) return status;
    glm53_pool_info info;
    glm53_pool_describe(crew->pool, &info);
    crew->has_lead = pthread_create(&crew->lead, NULL, lead_main, crew) == 0;
    if (!crew->has_lead) return GLM53_NO_THREAD;
    crew->num_pinned = info.num_pinned + (config->cpus && pin_lead(crew, config->cpus[0]));
    crew->has_watchdog = pthread_create(&crew->watchdog, NULL, watchdog_main, crew) == 0;
    return crew->has_watchdog ? GLM53_OK : GLM53_NO_THREAD;
}

static void free_crew(glm53_crew *crew) {
    glm53_pool_destroy(crew->pool);
    bed_destroy(&crew->lead_bed);
    bed_destroy(&crew->done_bed);
    bed_destroy(&crew->watchdog_bed);
    free(crew->rows);
    free(crew);
}

int32_t glm53_crew_create(const glm53_crew_config *config, glm53_crew **out) {
    if (!out) return GLM53_BAD_ARGUMENT;
    *out = NULL;
    glm53_mailbox_shape shape;
    if (!is_complete(config) || !glm53_mailbox_shape_of(config->mailbox, &shape)) return GLM53_BAD_ARGUMENT;
    if (config->table[0].gate.in_features != shape.hidden) return GLM53_BAD_SHAPE;
    glm53_crew *crew = aligned_alloc(64, (sizeof *crew + 63) / 64 * 64);
    if (!crew) return GLM53_NO_MEMORY;
    memset(crew, 0, sizeof *crew);
    crew->config = *config;
    crew->shape = shape;
    glm53_mailbox_measure(&shape, &crew->layout);
    atomic_init(&crew->next_seq, shape.first_seq);
    crew->next_post = shape.first_seq;
    bed_init(&crew->lead_bed);
    bed_init(&crew->done_bed);
    bed_init(&crew->watchdog_bed);
    crew->rows = malloc((size_t)shape.max_rows * (size_t)shape.hidden * sizeof *crew->rows);
    int32_t status = crew->rows ? start_threads(crew) : GLM53_NO_MEMORY;
    if (status != GLM53_OK) {
        glm53_crew_destroy(crew);
        return status;
    }
    crew->config.cpus = NULL; /* the caller's, no longer needed */
    *out = crew;
    return GLM53_OK;
}

/* A lead that hangs is not waited for without end. */
static bool join_lead(glm53_crew *crew) {
#if defined(__linux__)
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += crew->config.deadline_ms / 1000 + 1;
    return pthread_timedjoin_np(crew->lead, NULL, &end) == 0;
#else
    return pthread_join(crew->lead, NULL) == 0;
#endif
}

int32_t glm53_crew_destroy(glm53_crew *crew) {
    if (!crew) return GLM53_OK;
    atomic_store(&crew->state, CLOSING);
    bed_wake(&crew->lead_bed);
    bed_wake(&crew->watchdog_bed);
    if (crew->has_watchdog) pthread_join(crew->watchdog, NULL);
    crew->has_watchdog = false;
    if (crew->has_lead && !join_lead(crew)) return GLM53_STALLED;
    free_crew(crew);
    return GLM53_OK;
}

/* ---- the producer's side ---- */

void glm53_crew_ring(glm53_crew *crew) {
    if (!crew) return;
    atomic_fetch_add(&crew->bell, 1);
    bed_wake(&crew->lead_bed);
}

int32_t glm53_crew_post(glm53_crew *crew, const glm53_mail *mail, uint32_t *seq) {
    if (!crew || !mail || !seq || !mail->x || !mail->picks || !mail->weights) return GLM53_BAD_ARGUMENT;
    if (mail->rows < 1 || mail->rows > crew->shape.max_rows) return GLM53_BAD_ARGUMENT;
    if (mail->num_picks < 1 || mail->num_picks > crew->shape.max_picks) return GLM53_BAD_ARGUMENT;
    uint32_t next = crew->next_post;
    uint8_t *cell = cell_of(crew, next);
    if (glm53_mail_load(cell, GLM53_MAIL_DONE) != next - (uint32_t)crew->shape.num_cells) return GLM53_FULL;
    int32_t kind = GLM53_X_F32;
    size_t picks = (size_t)mail->rows * (size_t)mail->num_picks;
    memcpy(cell + GLM53_MAIL_LAYER, &mail->layer, sizeof mail->layer);
    memcpy(cell + GLM53_MAIL_ROWS, &mail->rows, sizeof mail->rows);
    memcpy(cell + GLM53_MAIL_NUM_PICKS, &mail->num_picks, sizeof mail->num_picks);
    memcpy(cell + GLM53_MAIL_X_KIND, &kind, sizeof kind);
    memcpy(cell + GLM53_MAIL_PICKS, mail->picks, picks * sizeof *mail->picks);
    memcpy(cell + crew->layout.weights_offset, mail->weights, picks * sizeof *mail->weights);
    memcpy(cell + crew->layout.x_offset, mail->x,
           (size_t)mail->rows * (size_t)crew->shape.hidden * sizeof *mail->x);
    glm53_mail_store(cell, GLM53_MAIL_POSTED, next);
    crew->next_post = next + 1;
    glm53_crew_ring(crew);
    *seq = next;
    return GLM53_OK;
}

static int32_t answer_of(const glm53_crew *crew, uint32_t seq) {
    if (atomic_load(&crew->state) == FAILED) return GLM53_STALLED;
    int32_t status;
    memcpy(&status, cell_of(crew, seq) + GLM53_MAIL_STATUS, sizeof status);
    return status;
}

int32_t glm53_crew_wait(glm53_crew *crew, uint32_t seq, int32_t timeout_ms) {
    if (!crew || timeout_ms < 0) return GLM53_BAD_ARGUMENT;
    for (int32_t i = 0; i < 16 * ROUNDS; i++) {
        if (glm53_mail_load(cell_of(crew, seq), GLM53_MAIL_DONE) == seq) return answer_of(crew, seq);
        cpu_relax();
    }
    int64_t end_ns = now_ns() + timeout_ms * MS_NS;
    bed *b = &crew->done_bed;
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->num_sleepers, 1);
    while (!is_done(crew, seq) && now_ns() < end_ns) bed_sleep_until(b, end_ns);
    atomic_fetch_sub(&b->num_sleepers, 1);
    pthread_mutex_unlock(&b->mutex);
    return is_done(crew, seq) ? answer_of(crew, seq) : GLM53_STALLED;
}

int32_t glm53_crew_check(const glm53_crew *crew) {
    return crew ? atomic_load(&crew->first_error) : GLM53_BAD_ARGUMENT;
}

int32_t glm53_crew_describe(const glm53_crew *crew, glm53_crew_stats *stats) {
    if (!crew || !stats) return GLM53_BAD_ARGUMENT;
    stats->num_jobs = atomic_load(&crew->num_jobs);
    stats->num_empty = atomic_load(&crew->num_empty);
    stats->num_picks = atomic_load(&crew->num_picks);
    stats->num_experts = atomic_load(&crew->num_experts);
    stats->busy_ns = atomic_load(&crew->busy_ns);
    stats->num_parks = atomic_load(&crew->num_parks);
    stats->num_pinned = crew->num_pinned;
    stats->is_failed = atomic_load(&crew->state) == FAILED;
    return GLM53_OK;
}
