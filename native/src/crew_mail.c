/* The producer's side of a crew: ring, post, wait, and what is known of the jobs. */
#define _GNU_SOURCE
#include "crew.h"

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
    memcpy(cell + GLM53_MAIL_PART_EXPERT, &mail->part_expert, sizeof mail->part_expert);
    memcpy(cell + GLM53_MAIL_PART_BLOCKS, &mail->part_blocks, sizeof mail->part_blocks);
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

int32_t glm53_crew_begin(glm53_crew *crew, int32_t layer, const glm53_expert_job *job) {
    if (!crew || !job || layer < 0 || layer >= crew->config.num_layers) return GLM53_BAD_ARGUMENT;
    if (atomic_load(&crew->state) == FAILED) return GLM53_STALLED;
    if (atomic_load(&crew->errand_state) != ERRAND_NONE) return GLM53_BUSY;
    crew->errand = (glm53_expert_job){.x = job->x,
                                      .picks = job->picks,
                                      .weights = job->weights,
                                      .y = job->y,
                                      .rows = job->rows,
                                      .num_picks = job->num_picks};
    equip_job(crew, layer, &crew->errand);
    atomic_store(&crew->errand_state, ERRAND_BEGUN);
    glm53_crew_ring(crew);
    return GLM53_OK;
}

int32_t glm53_crew_finish(glm53_crew *crew, int64_t *elapsed_ns) {
    if (!crew || atomic_load(&crew->errand_state) == ERRAND_NONE) return GLM53_BAD_ARGUMENT;
    bed *b = &crew->done_bed;
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->num_sleepers, 1);
    /* The watchdog ends this, and looks as often. */
    while (atomic_load(&crew->errand_state) != ERRAND_ENDED && is_running(crew)) {
        bed_sleep_until(b, now_ns() + crew->config.deadline_ms * MS_NS);
    }
    atomic_fetch_sub(&b->num_sleepers, 1);
    pthread_mutex_unlock(&b->mutex);
    if (!is_running(crew)) return GLM53_STALLED;
    if (elapsed_ns) *elapsed_ns = crew->errand_ns;
    int32_t status = crew->errand_status;
    atomic_store(&crew->errand_state, ERRAND_NONE);
    return status;
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
    stats->num_blocks = atomic_load(&crew->num_blocks);
    stats->busy_ns = atomic_load(&crew->busy_ns);
    stats->num_parks = atomic_load(&crew->num_parks);
    stats->num_pinned = crew->num_pinned;
    stats->is_failed = atomic_load(&crew->state) == FAILED;
    return GLM53_OK;
}
