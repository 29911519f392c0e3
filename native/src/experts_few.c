/* Experts of few rows, as in a decode step, where a job takes tenths of a millisecond: no phases with
 * barriers between them, but one list of small tasks that the threads take in order, each waiting only for
 * what it needs.
 *
 *   PREPARE   visit x {gate, up} x some blocks   input transform of the row
 *   MULTIPLY  group x stage x {gate, up} x span  packed weights times rows; waits for the group's PREPARE
 *   ACTIVATE  group x stage x row x block        waits for the stage's MULTIPLY
 *   DOWN      group x stage x span x columns     packed weights times rows; waits for the stage's ACTIVATE
 *   COMBINE   block x row                        waits for every DOWN
 *
 * A stage is a band of the intermediate, a few blocks wide. Of an expert in part the stages have what lies in
 * the part, some of them nothing. The list: all of PREPARE; the stages' MULTIPLY,
 * each with the ACTIVATE of the stage before behind it; DOWN in the same order, with the last ACTIVATE behind
 * the first; COMBINE. So what a task waits for has mostly been done long before. A task waits for tasks
 * before it only, and a thread does its tasks in order: the first unfinished task can always go on, so
 * nothing blocks.
 *
 * A thread takes its next task before it does the present one, whose last tiles then prefetch the next one's
 * first: at 32 tiles of two blocks, cold and out of order, that is the difference between 2.03 and 1.68 ms an
 * expert (Zen, AVX-512, 4096 x 2048 x 3). */
#include <stdatomic.h>

#include "experts.h"

enum {
    STAGE_BLOCKS = 4,   /* about: it is whole spans of down */
    PREPARE_BLOCKS = 4, /* 0.3 microseconds */
    DOWN_TILES = 32,    /* columns of a DOWN task: 9 microseconds at two blocks of k */
    LAST_TILES = 16     /* in the last step: the last tasks of the threads end closer together */
};

typedef enum { PREPARE, MULTIPLY, ACTIVATE, DOWN, COMBINE, END } step_kind;

struct glm53_few_step {
    int64_t first; /* number of its first task; the next step's begins where it ends */
    step_kind kind;
    int32_t group, stage;
    int32_t part_tiles; /* DOWN */
};

struct glm53_few_counter {
    _Alignas(64) atomic_int value;
};

/* Counters: DOWN tasks done, then of each group PREPARE, and of each of its stages MULTIPLY and ACTIVATE. */
static int32_t group_counters(const glm53_few *few) { return 1 + 2 * few->num_stages; }

static atomic_int *prepared(const glm53_few *few, int32_t group) {
    return &few->counters[1 + group * group_counters(few)].value;
}

static atomic_int *multiplied(const glm53_few *few, const glm53_few_step *step) {
    return &few->counters[2 + step->group * group_counters(few) + 2 * step->stage].value;
}

static atomic_int *activated(const glm53_few *few, const glm53_few_step *step) {
    return &few->counters[3 + step->group * group_counters(few) + 2 * step->stage].value;
}

static int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

static int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

static const glm53_group *group_of(const glm53_few *few, const glm53_few_step *step) {
    return &few->wave->groups[step->group];
}

/* The end of stage s - 1 and the begin of stage s of a group, in blocks of the intermediate. */
static int32_t block_at(const glm53_few *few, const glm53_group *g, int32_t s) {
    return max_i32(g->block_begin, min_i32(s * few->stage_blocks, g->block_end));
}

static int32_t stage_blocks(const glm53_few *few, const glm53_few_step *step) {
    const glm53_group *g = group_of(few, step);
    return block_at(few, g, step->stage + 1) - block_at(few, g, step->stage);
}

/* The first span of down that belongs to a step's stage, and how many do. */
static int32_t first_span(const glm53_few *few, const glm53_few_step *step) {
    return max_i32(step->stage * few->stage_spans, group_of(few, step)->down.first_span);
}

static int32_t down_spans(const glm53_few *few, const glm53_few_step *step) {
    int32_t end = min_i32((step->stage + 1) * few->stage_spans, group_of(few, step)->down.end_span);
    return max_i32(0, end - first_span(few, step));
}

static int32_t prepare_tasks(const glm53_few *few, const glm53_group *g) {
    return g->gate.rows * 2 * ceil_div(few->wave->hidden / GLM53_BLOCK, PREPARE_BLOCKS);
}

static int32_t multiply_tasks(const glm53_few *few, const glm53_few_step *step) {
    return stage_blocks(few, step) ? 2 * group_of(few, step)->gate.cut.num_spans : 0;
}

static int32_t down_columns(const glm53_few *few, const glm53_few_step *step) {
    return ceil_div(few->wave->hidden / GLM53_TILE, step->part_tiles);
}

static int32_t tasks_of(const glm53_few *few, const glm53_few_step *step) {
    const glm53_wave *w = few->wave;
    if (step->kind == COMBINE) return (w->row_end - w->row_begin) * (w->hidden / GLM53_BLOCK);
    const glm53_group *g = group_of(few, step);
    if (step->kind == PREPARE) return prepare_tasks(few, g);
    if (step->kind == MULTIPLY) return multiply_tasks(few, step);
    if (step->kind == ACTIVATE) return g->gate.rows * stage_blocks(few, step);
    return down_spans(few, step) * down_columns(few, step);
}

/* ---- the list ---- */

static void add_step(glm53_few *few, step_kind kind, int32_t group, int32_t stage, int32_t part_tiles) {
    glm53_few_step *step = &few->steps[few->num_steps++];
    *step = (glm53_few_step){few->num_tasks, kind, group, stage, part_tiles};
    if (kind == END) return;
    few->num_tasks += tasks_of(few, step);
    if (kind == DOWN) few->down_tasks += tasks_of(few, step);
}

/* i counts the stages of all groups. */
static void add_stage(glm53_few *few, step_kind kind, int32_t i) {
    int32_t part_tiles = i == few->last_stage ? LAST_TILES : DOWN_TILES;
    add_step(few, kind, i / few->num_stages, i % few->num_stages, part_tiles);
}

static void list_steps(glm53_few *few) {
    int32_t num_groups = few->wave->num_groups, num = num_groups * few->num_stages;
    few->last_stage = num - 1;
    if (num_groups) {
        const glm53_group *g = &few->wave->groups[num_groups - 1];
        few->last_stage -= few->num_stages - ceil_div(g->block_end, few->stage_blocks);
    }
    for (int32_t i = 0; i < num_groups; i++) add_step(few, PREPARE, i, 0, 0);
    for (int32_t i = 0; i < num; i++) {
        add_stage(few, MULTIPLY, i);
        if (i > 0) add_stage(few, ACTIVATE, i - 1);
    }
    for (int32_t i = 0; i < num; i++) {
        /* With one stage there is nothing that could come in between. */
        if (i == num - 1 && i == 0) add_stage(few, ACTIVATE, i);
        add_stage(few, DOWN, i);
        if (i == 0 && num > 1) add_stage(few, ACTIVATE, num - 1);
    }
    add_step(few, COMBINE, 0, 0, 0);
    add_step(few, END, 0, 0, 0);
}

glm53_few glm53_few_plan(glm53_arena *arena, const glm53_wave *w) {
    glm53_few few = {.wave = w};
    if (w->num_groups) {
        const glm53_cut *cut = &w->groups[0].down.cut; /* the shapes of all experts are one */
        few.stage_spans = ceil_div(STAGE_BLOCKS, cut->span_blocks);
        few.stage_blocks = few.stage_spans * cut->span_blocks;
        few.num_stages = ceil_div(cut->num_spans, few.stage_spans);
    }
    few.num_counters = 1 + w->num_groups * group_counters(&few);
    size_t num_steps = (size_t)w->num_groups * (1 + 3 * (size_t)few.num_stages) + 2;
    few.steps = glm53_arena_take(arena, num_steps, sizeof *few.steps);
    few.counters = glm53_arena_take(arena, (size_t)few.num_counters, sizeof *few.counters);
    return few;
}

/* ---- the tasks ---- */

static bool is_product(const glm53_few_step *step) { return step->kind == MULTIPLY || step->kind == DOWN; }

/* What task number `task` of a MULTIPLY or DOWN step multiplies. */
static const glm53_product *product_of(const glm53_few *few, const glm53_few_step *step, int32_t task,
                                       glm53_rect *rect) {
    const glm53_group *g = group_of(few, step);
    if (step->kind == MULTIPLY) {
        const glm53_product *product = task % 2 ? &g->up : &g->gate;
        int32_t unit = GLM53_BLOCK / GLM53_TILE;
        *rect = glm53_product_rect(product, task / 2, unit * block_at(few, g, step->stage),
                                   unit * block_at(few, g, step->stage + 1));
        return product;
    }
    int32_t num_columns = down_columns(few, step), begin = task % num_columns * step->part_tiles;
    *rect = glm53_product_rect(&g->down, first_span(few, step) + task / num_columns, begin,
                               min_i32(begin + step->part_tiles, few->wave->hidden / GLM53_TILE));
    return &g->down;
}

static void do_prepare(glm53_pool *pool, const glm53_few *few, const glm53_few_step *step, int32_t task) {
    int32_t num_blocks = few->wave->hidden / GLM53_BLOCK, runs = ceil_div(num_blocks, PREPARE_BLOCKS);
    int32_t visit = group_of(few, step)->first_visit + task / runs / 2;
    int32_t begin = task % runs * PREPARE_BLOCKS;
    glm53_wave_prepare(glm53_pool_tier(pool), few->wave, visit, task / runs % 2, begin,
                       min_i32(begin + PREPARE_BLOCKS, num_blocks));
    glm53_pool_raise(pool, prepared(few, step->group));
}

static void do_product(glm53_pool *pool, const glm53_few *few, const glm53_few_step *step, int32_t task,
                       const glm53_rect *next) {
    const glm53_group *g = group_of(few, step);
    glm53_rect rect;
    const glm53_product *product = product_of(few, step, task, &rect);
    rect.next = next;
    if (step->kind == MULTIPLY) {
        glm53_pool_await(pool, prepared(few, step->group), prepare_tasks(few, g));
    } else {
        glm53_pool_await(pool, activated(few, step), g->gate.rows * stage_blocks(few, step));
    }
    glm53_product_multiply(glm53_pool_tier(pool), product, &rect);
    glm53_pool_raise(pool, step->kind == MULTIPLY ? multiplied(few, step) : &few->counters[0].value);
}

static void do_activate(glm53_pool *pool, const glm53_few *few, const glm53_few_step *step, int32_t task) {
    const glm53_group *g = group_of(few, step);
    glm53_pool_await(pool, multiplied(few, step), multiply_tasks(few, step));
    glm53_wave_activate(glm53_pool_tier(pool), few->wave, g->first_visit + task % g->gate.rows,
                        block_at(few, g, step->stage) + task / g->gate.rows);
    glm53_pool_raise(pool, activated(few, step));
}

static void do_combine(glm53_pool *pool, const glm53_few *few, int32_t task) {
    int32_t rows = few->wave->row_end - few->wave->row_begin;
    glm53_pool_await(pool, &few->counters[0].value, (int32_t)few->down_tasks);
    glm53_wave_combine(glm53_pool_tier(pool), few->wave, task % rows, task / rows);
}

/* next: the weights of the thread's next task, or NULL. */
static void do_task(glm53_pool *pool, const glm53_few *few, const glm53_few_step *step, int32_t task,
                    const glm53_rect *next) {
    if (is_product(step)) {
        do_product(pool, few, step, task, next);
        return;
    }
    if (next) glm53_rect_prefetch(next);
    if (step->kind == PREPARE) do_prepare(pool, few, step, task);
    if (step->kind == ACTIVATE) do_activate(pool, few, step, task);
    if (step->kind == COMBINE) do_combine(pool, few, task);
}

/* The step of a task, which is not before `step`. */
static const glm53_few_step *step_of(const glm53_few_step *step, int64_t task) {
    while (step->kind != END && step[1].first <= task) step++;
    return step;
}

static void few_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const glm53_few *few = context;
    int64_t task = glm53_pool_next(pool);
    const glm53_few_step *step = step_of(few->steps, task);
    while (step->kind != END) {
        int64_t next_task = glm53_pool_next(pool);
        const glm53_few_step *next_step = step_of(step, next_task);
        glm53_rect next;
        if (is_product(next_step)) product_of(few, next_step, (int32_t)(next_task - next_step->first), &next);
        do_task(pool, few, step, (int32_t)(task - step->first), is_product(next_step) ? &next : NULL);
        task = next_task;
        step = next_step;
    }
}

void glm53_few_run(glm53_pool *pool, glm53_few *few) {
    const glm53_wave *w = few->wave;
    memset(few->counters, 0, (size_t)few->num_counters * sizeof *few->counters);
    list_steps(few);
    glm53_pool_run(pool, few_main, few, (int64_t)w->num_visits * 3 * w->hidden * w->intermediate);
}
