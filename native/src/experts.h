/* What the two ways of computing a wave of gated experts share. Not installed. */
#ifndef GLM53_EXPERTS_H
#define GLM53_EXPERTS_H

#include "product.h"

/* The visits of one expert; a visit is one (row, expert) pair. */
typedef struct {
    glm53_product gate, up, down;
    int32_t first_visit;
    int32_t block_begin, block_end;     /* of the intermediate: all but for an expert in part */
    int64_t first_multiply, first_down; /* numbers of the group's first tasks, if wide */
} glm53_group;

/* The rows that are computed at once, their picks sorted by expert. */
typedef struct {
    const glm53_expert_job *spec;
    int32_t hidden, intermediate;
    int32_t row_begin, row_end;
    int32_t num_visits, num_groups;
    int32_t *counts;      /* (num_experts): visits, then the expert's group */
    int32_t *pick_visit;  /* (rows of the wave, num_picks): visit or -1 */
    int32_t *visit_row;   /* (num_visits) */
    int32_t *visit_group; /* (num_visits) */
    glm53_group *groups;
} glm53_wave;

/* Hands out pieces of one allocation, each on cache lines of its own; with base NULL it only counts. */
typedef struct {
    char *base;
    size_t used;
} glm53_arena;

static inline void *glm53_arena_take(glm53_arena *arena, size_t count, size_t size) {
    size_t offset = arena->used;
    arena->used += (count * size + 63) / 64 * 64;
    return arena->base ? arena->base + offset : NULL;
}

/* 128-blocks [begin, end) of a visit's row, through suh of gate (is_up: of up) and H. */
void glm53_wave_prepare(const glm53_tier *tier, const glm53_wave *w, int32_t visit, bool is_up, int32_t begin,
                        int32_t end);
/* A block of a visit's intermediate: output transform of gate and up, silu, clamp, product, input transform
 * of down. */
void glm53_wave_activate(const glm53_tier *tier, const glm53_wave *w, int32_t visit, int32_t block);
/* A block of row r of the wave: output transform of down, weighted sum in the order of the row's picks. */
void glm53_wave_combine(const glm53_tier *tier, const glm53_wave *w, int32_t r, int32_t block);

/* experts_wide.c: five phases of all threads. Take what it needs from the arena; then run, if that had
 * memory. */
typedef struct {
    const glm53_wave *wave;
    float *temps;
    size_t temp_floats; /* per thread */
    int64_t multiply_tasks, down_tasks;
} glm53_wide;

glm53_wide glm53_wide_plan(const glm53_pool *pool, glm53_arena *arena, glm53_wave *w);
void glm53_wide_run(glm53_pool *pool, glm53_wide *wide);

/* experts_few.c: tasks that wait for one another, for at most GLM53_FEW_ROWS rows. Likewise. */
typedef struct glm53_few_step glm53_few_step;
typedef struct glm53_few_counter glm53_few_counter;

typedef struct {
    const glm53_wave *wave;
    glm53_few_step *steps;
    glm53_few_counter *counters;
    int32_t num_steps, num_stages;
    int32_t last_stage; /* counted over all groups; those behind it have no tasks */
    int32_t num_counters;
    int32_t stage_blocks, stage_spans;
    int64_t down_tasks, num_tasks;
} glm53_few;

glm53_few glm53_few_plan(glm53_arena *arena, const glm53_wave *w);
void glm53_few_run(glm53_pool *pool, glm53_few *few);

#endif
