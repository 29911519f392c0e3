/* What the parts of a crew share: its states, its sleepers and the words of its cells. Not installed. */
#ifndef GLM53_CREW_H
#define GLM53_CREW_H

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "mailbox.h"

enum { RUNNING = 0, FAILED = 1, CLOSING = 2 };

/* Of an errand. The producer goes from NONE to BEGUN and from ENDED to NONE, the lead from BEGUN to TAKEN and
 * from there to ENDED. */
enum { ERRAND_NONE = 0, ERRAND_BEGUN = 1, ERRAND_TAKEN = 2, ERRAND_ENDED = 3 };

/* What the watchdog grants one, in deadlines: a layer of a whole prompt on few slow cores takes a second. */
enum { ERRAND_DEADLINES = 10 };

static const int64_t MS_NS = 1000000;

/* Rounds between two looks at the clock: about 2 microseconds at a pause of 40 cycles. */
enum { ROUNDS = 128 };

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
    glm53_expert_job errand; /* the producer's while NONE or ENDED, the lead's otherwise */
    int64_t errand_ns;       /* likewise */
    int32_t errand_status;   /* likewise */
    _Alignas(64) atomic_int errand_state;
    atomic_llong num_jobs, num_empty, num_picks, num_experts, num_blocks, busy_ns, num_parks;
    int32_t num_pinned;
};

/* The lead's thread (crew_lead.c). argument: the crew. */
void *glm53_crew_lead(void *argument);

/* The watchdog's thread (crew_watchdog.c). argument: the crew. */
void *glm53_crew_watchdog(void *argument);

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whoever changes what a sleeper waits for calls this afterwards. No wake-up is lost: the sleeper counts
 * itself before it looks, the other one changes before it looks at the count, and all four accesses are
 * sequentially consistent. True if there was a sleeper. */
static inline bool bed_wake(bed *b) {
    if (atomic_load(&b->num_sleepers) == 0) return false;
    pthread_mutex_lock(&b->mutex);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
    return true;
}

static inline void bed_sleep_until(bed *b, int64_t end_ns) {
    struct timespec end = {.tv_sec = end_ns / 1000000000, .tv_nsec = end_ns % 1000000000};
    pthread_cond_timedwait(&b->changed, &b->mutex, &end);
}

static inline uint8_t *cell_of(const glm53_crew *crew, uint32_t seq) {
    size_t i = seq % (uint32_t)crew->shape.num_cells;
    return (uint8_t *)crew->config.mailbox + GLM53_MAIL_HEADER_BYTES + i * (size_t)crew->layout.cell_bytes;
}

static inline bool is_running(const glm53_crew *crew) { return atomic_load(&crew->state) == RUNNING; }

static inline bool is_posted(const glm53_crew *crew, uint32_t seq) {
    return __atomic_load_n(glm53_mail_word(cell_of(crew, seq), GLM53_MAIL_POSTED), __ATOMIC_SEQ_CST) == seq;
}

static inline bool is_done(const glm53_crew *crew, uint32_t seq) {
    return __atomic_load_n(glm53_mail_word(cell_of(crew, seq), GLM53_MAIL_DONE), __ATOMIC_SEQ_CST) == seq;
}

static inline bool has_errand(const glm53_crew *crew) {
    return atomic_load(&crew->errand_state) == ERRAND_BEGUN;
}

/* What a job of some layer has from the crew. */
static inline void equip_job(const glm53_crew *crew, int32_t layer, glm53_expert_job *job) {
    job->table = crew->config.table + (size_t)layer * (size_t)crew->config.num_experts;
    job->num_experts = crew->config.num_experts;
    job->precision = crew->config.precision;
    job->clamp = crew->config.clamp;
    job->limit = crew->config.limit;
}

static inline void note_error(glm53_crew *crew, int32_t status) {
    int none = GLM53_OK;
    if (status != GLM53_OK) atomic_compare_exchange_strong(&crew->first_error, &none, status);
}

#endif
