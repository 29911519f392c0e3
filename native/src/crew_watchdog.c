/* The watchdog: fails a crew whose oldest job has waited too long, and answers in its stead. */
#define _GNU_SOURCE
#include "crew.h"

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

/* Mail waits for as long as an errand is done; the errand is watched then. */
static bool is_late(const glm53_crew *crew, int64_t mail_since, int64_t errand_since) {
    int64_t deadline_ns = crew->config.deadline_ms * MS_NS;
    if (errand_since) return now_ns() - errand_since >= ERRAND_DEADLINES * deadline_ns;
    return now_ns() - mail_since >= deadline_ns;
}

void *glm53_crew_watchdog(void *argument) {
    glm53_crew *crew = argument;
    int64_t tick_ns = crew->config.deadline_ms * MS_NS / 8;
    uint32_t seq = atomic_load(&crew->next_seq), answered = 0;
    int64_t since = now_ns(), errand_since = 0;
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
        int errand = atomic_load(&crew->errand_state);
        bool is_errand = errand == ERRAND_BEGUN || errand == ERRAND_TAKEN;
        if (is_errand || current != seq || !is_posted(crew, seq) || is_done(crew, seq)) {
            seq = current;
            since = now_ns();
            errand_since = !is_errand ? 0 : errand_since ? errand_since : since;
            if (!is_errand) continue;
        } else {
            errand_since = 0;
        }
        int running = RUNNING;
        if (!is_late(crew, since, errand_since)) continue;
        if (!atomic_compare_exchange_strong(&crew->state, &running, FAILED)) continue;
        note_error(crew, GLM53_STALLED);
        answered = answer_stalled(crew, seq);
        bed_wake(&crew->lead_bed);
    }
    atomic_fetch_sub(&b->num_sleepers, 1);
    pthread_mutex_unlock(&b->mutex);
    return NULL;
}
