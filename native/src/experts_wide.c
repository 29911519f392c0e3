/* Experts of many rows: five phases with a barrier between them, each a list of tasks:
 *
 *   prepare   visit x {gate, up}        input transform of the row
 *   multiply  group x {gate, up} x cut  packed weights times rows
 *   activate  visit x block             up to the input transform of down
 *   multiply  group x cut               down
 *   combine   row x block               output transform, weighted sum
 */
#include "experts.h"

static void prepare_phase(glm53_pool *pool, const glm53_wave *w) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    for (int64_t task; (task = glm53_pool_next(pool)) < 2 * (int64_t)w->num_visits;) {
        glm53_wave_prepare(tier, w, (int32_t)(task / 2), task % 2, 0, w->hidden / GLM53_BLOCK);
    }
}

static void multiply_phase(glm53_pool *pool, const glm53_wide *wide, float *temp) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    const glm53_wave *w = wide->wave;
    int32_t i = 0; /* a thread's task numbers only rise, so its group does, too */
    for (int64_t task; (task = glm53_pool_next(pool)) < wide->multiply_tasks;) {
        while (i + 1 < w->num_groups && w->groups[i + 1].first_multiply <= task) i++;
        const glm53_group *g = &w->groups[i];
        int64_t local = task - g->first_multiply, gate_tasks = glm53_product_tasks(&g->gate);
        if (local < gate_tasks) {
            glm53_product_task(tier, &g->gate, local, temp);
        } else {
            glm53_product_task(tier, &g->up, local - gate_tasks, temp);
        }
    }
}

static void activate_phase(glm53_pool *pool, const glm53_wave *w) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    int32_t blocks = w->intermediate / GLM53_BLOCK;
    for (int64_t task; (task = glm53_pool_next(pool)) < (int64_t)w->num_visits * blocks;) {
        glm53_wave_activate(tier, w, (int32_t)(task / blocks), (int32_t)(task % blocks));
    }
}

static void down_phase(glm53_pool *pool, const glm53_wide *wide, float *temp) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    const glm53_wave *w = wide->wave;
    int32_t i = 0;
    for (int64_t task; (task = glm53_pool_next(pool)) < wide->down_tasks;) {
        while (i + 1 < w->num_groups && w->groups[i + 1].first_down <= task) i++;
        glm53_product_task(tier, &w->groups[i].down, task - w->groups[i].first_down, temp);
    }
}

static void combine_phase(glm53_pool *pool, const glm53_wave *w) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    int32_t blocks = w->hidden / GLM53_BLOCK;
    int64_t num_tasks = (int64_t)(w->row_end - w->row_begin) * blocks;
    for (int64_t task; (task = glm53_pool_next(pool)) < num_tasks;) {
        glm53_wave_combine(tier, w, (int32_t)(task / blocks), (int32_t)(task % blocks));
    }
}

static void wide_main(glm53_pool *pool, void *context, int32_t thread) {
    const glm53_wide *wide = context;
    float *temp = wide->temps + (size_t)thread * wide->temp_floats;
    prepare_phase(pool, wide->wave);
    glm53_pool_barrier(pool);
    multiply_phase(pool, wide, temp);
    glm53_pool_barrier(pool);
    activate_phase(pool, wide->wave);
    glm53_pool_barrier(pool);
    down_phase(pool, wide, temp);
    glm53_pool_barrier(pool);
    combine_phase(pool, wide->wave);
}

glm53_wide glm53_wide_plan(const glm53_pool *pool, glm53_arena *arena, glm53_wave *w) {
    glm53_wide wide = {.wave = w};
    int32_t most_rows = 0;
    for (int32_t i = 0; i < w->num_groups; i++) {
        glm53_group *g = &w->groups[i];
        g->first_multiply = wide.multiply_tasks;
        g->first_down = wide.down_tasks;
        wide.multiply_tasks += glm53_product_tasks(&g->gate) + glm53_product_tasks(&g->up);
        wide.down_tasks += glm53_product_tasks(&g->down);
        if (g->gate.rows > most_rows) most_rows = g->gate.rows;
    }
    wide.temp_floats = (size_t)most_rows * GLM53_BLOCK;
    wide.temps = glm53_arena_take(arena, wide.temp_floats * (size_t)glm53_pool_threads(pool), sizeof(float));
    return wide;
}

void glm53_wide_run(glm53_pool *pool, glm53_wide *wide) {
    const glm53_wave *w = wide->wave;
    glm53_pool_run(pool, wide_main, wide, (int64_t)w->num_visits * 3 * w->hidden * w->intermediate);
}
