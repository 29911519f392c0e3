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
#include "crew.h"

#include <sched.h>
#include <stdlib.h>

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
    crew->has_lead = pthread_create(&crew->lead, NULL, glm53_crew_lead, crew) == 0;
    if (!crew->has_lead) return GLM53_NO_THREAD;
    crew->num_pinned = info.num_pinned + (config->cpus && pin_lead(crew, config->cpus[0]));
    crew->has_watchdog = pthread_create(&crew->watchdog, NULL, glm53_crew_watchdog, crew) == 0;
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
