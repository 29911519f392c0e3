/* The lead: polls the mailbox, computes each job with its pool, answers, parks when idle. */
#define _GNU_SOURCE
#include <sched.h>

#include "crew.h"

static const int64_t PARKED_LOOK_NS = 100000000;

static void park(glm53_crew *crew, uint32_t seq, unsigned bell) {
    bed *b = &crew->lead_bed;
    atomic_fetch_add(&crew->num_parks, 1);
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->num_sleepers, 1);
    while (atomic_load(&crew->bell) == bell && !is_posted(crew, seq) && !has_errand(crew) &&
           is_running(crew)) {
        bed_sleep_until(b, now_ns() + PARKED_LOOK_NS);
    }
    atomic_fetch_sub(&b->num_sleepers, 1);
    pthread_mutex_unlock(&b->mutex);
}

static int32_t compute(glm53_crew *crew, const glm53_expert_job *job) {
    if (crew->config.compute) return crew->config.compute(crew->config.context, job);
    return glm53_experts(crew->pool, job);
}

static void run_errand(glm53_crew *crew) {
    atomic_store(&crew->errand_state, ERRAND_TAKEN);
    int64_t begin_ns = now_ns();
    crew->errand_status = compute(crew, &crew->errand);
    crew->errand_ns = now_ns() - begin_ns;
    atomic_store(&crew->errand_state, ERRAND_ENDED);
    if (bed_wake(&crew->done_bed)) sched_yield();
}

/* False when the crew no longer runs. Does errands meanwhile. */
static bool await_post(glm53_crew *crew, uint32_t seq) {
    uint8_t *cell = cell_of(crew, seq);
    unsigned bell = atomic_load(&crew->bell);
    for (int64_t since = now_ns();;) {
        for (int32_t i = 0; i < ROUNDS; i++) {
            if (glm53_mail_load(cell, GLM53_MAIL_POSTED) == seq) return is_running(crew);
            cpu_relax();
        }
        if (!is_running(crew)) return false;
        if (has_errand(crew)) {
            run_errand(crew);
            since = now_ns();
        }
        if (now_ns() - since < (int64_t)crew->config.poll_us * 1000) continue;
        park(crew, seq, bell);
        bell = atomic_load(&crew->bell);
        /* The bell rings before a step: its first job should not have to wait for sleeping workers. */
        if (is_running(crew) && !is_posted(crew, seq) && !has_errand(crew)) glm53_pool_rouse(crew->pool);
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
    memcpy(&job->part_expert, cell + GLM53_MAIL_PART_EXPERT, sizeof job->part_expert);
    memcpy(&job->part_end, cell + GLM53_MAIL_PART_BLOCKS, sizeof job->part_end);
    if (job->rows == 0) return GLM53_OK;
    if (job->rows < 0 || job->rows > crew->shape.max_rows) return GLM53_BAD_ARGUMENT;
    if (job->num_picks < 1 || job->num_picks > crew->shape.max_picks) return GLM53_BAD_ARGUMENT;
    if (layer < 0 || layer >= crew->config.num_layers) return GLM53_BAD_ARGUMENT;
    if (kind != GLM53_X_F32 && kind != GLM53_X_F16) return GLM53_BAD_ARGUMENT;
    equip_job(crew, layer, job);
    job->picks = (const int32_t *)(const void *)(cell + GLM53_MAIL_PICKS);
    job->weights = (const float *)(const void *)(cell + crew->layout.weights_offset);
    job->y = (float *)(void *)(cell + crew->layout.y_offset);
    job->x = (const float *)(const void *)(cell + crew->layout.x_offset);
    if (kind == GLM53_X_F16) {
        const uint16_t *halves = (const uint16_t *)(const void *)job->x;
        glm53_pool_tier(crew->pool)->widen(halves, job->rows * crew->shape.hidden, crew->rows);
        job->x = crew->rows;
    }
    return GLM53_OK;
}

typedef struct {
    int32_t picks, experts, blocks;
} pick_count;

/* At most 8 x 64 picks, mostly 8 or fewer. */
static pick_count count_picks(const glm53_expert_job *job) {
    pick_count count = {0};
    int32_t num = job->rows * job->num_picks, blocks = job->table[0].gate.out_features / GLM53_BLOCK;
    for (int32_t i = 0; i < num; i++) {
        if (job->picks[i] < 0) continue;
        int32_t j = 0;
        while (job->picks[j] != job->picks[i]) j++;
        count.picks++;
        if (j < i) continue;
        bool is_part = job->part_end > 0 && job->picks[i] == job->part_expert;
        count.experts++;
        count.blocks += is_part ? job->part_end : blocks;
    }
    return count;
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
    atomic_fetch_add(&crew->num_blocks, count.blocks);
    if (count.picks) atomic_fetch_add(&crew->busy_ns, elapsed_ns);
    note_error(crew, status);
    uint32_t stored_ns = elapsed_ns > (int64_t)UINT32_MAX ? UINT32_MAX : (uint32_t)elapsed_ns;
    memcpy(cell + GLM53_MAIL_STATUS, &status, sizeof status);
    memcpy(cell + GLM53_MAIL_NUM_EXPERTS, &count.experts, sizeof count.experts);
    memcpy(cell + GLM53_MAIL_ELAPSED_NS, &stored_ns, sizeof stored_ns);
    memcpy(cell + GLM53_MAIL_NUM_BLOCKS, &count.blocks, sizeof count.blocks);
    glm53_mail_store(cell, GLM53_MAIL_DONE, seq);
    /* A kernel may have put the sleeper on this very CPU, where a polling lead would keep it waiting for the
     * whole of poll_us: seen with unpinned threads on two busy cores. */
    if (bed_wake(&crew->done_bed)) sched_yield();
    return true;
}

void *glm53_crew_lead(void *argument) {
    glm53_crew *crew = argument;
    uint32_t seq = atomic_load(&crew->next_seq);
    while (await_post(crew, seq) && serve(crew, seq)) atomic_store(&crew->next_seq, ++seq);
    return NULL;
}
