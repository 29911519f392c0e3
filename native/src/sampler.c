/* Filters and draw of one token. Ids are ranked by (logit descending, id ascending): as one 64-bit key, the
 * smaller the better, so that no two are equal and every prefix of the ranking is a set of keys up to a
 * border. */
#include <stdlib.h>

#include "weigh.h"

enum {
    BLOCK = GLM53_WEIGHT_BLOCK,
    GROUPS = 1024,     /* of logits, whose maxima bound a count; eight times as many for a count above it */
    HEAVY = 1024,      /* a weight of 1/HEAVY of the total is one of the few that most rows consist of */
    RUN = 64,          /* logits that are passed over together */
    SAMPLES = 31,      /* keys that a pivot is chosen from */
    SORTED = 48,       /* so few keys are sorted */
    SAMPLED_STEPS = 16 /* after so many steps pivots halve the range of keys, which bounds the worst case */
};

struct glm53_sampler {
    const glm53_tier *tier;
    int32_t max_ids;
    double *weights; /* of the logits, or of those that top_k left; whole blocks */
    double *sums;    /* of the blocks */
    uint64_t *keys, *spare_keys;
    int32_t *ids;       /* what top_k left, ascending */
    float *logits;      /* theirs */
    int32_t *positions; /* indices of weights, ascending */
};

void glm53_sampler_destroy(glm53_sampler *sampler) {
    if (!sampler) return;
    free(sampler->weights);
    free(sampler->sums);
    free(sampler->keys);
    free(sampler->spare_keys);
    free(sampler->ids);
    free(sampler->logits);
    free(sampler->positions);
    free(sampler);
}

int32_t glm53_sampler_create(int32_t max_ids, int32_t isa, glm53_sampler **sampler) {
    if (!sampler) return GLM53_BAD_ARGUMENT;
    *sampler = NULL;
    if (max_ids < 1) return GLM53_BAD_ARGUMENT;
    const glm53_tier *tier = glm53_find_tier(isa);
    if (!tier) return GLM53_NO_ISA;
    glm53_sampler *made = calloc(1, sizeof *made);
    if (!made) return GLM53_NO_MEMORY;
    size_t ids = (size_t)max_ids, blocks = (ids + BLOCK - 1) / BLOCK;
    made->tier = tier;
    made->max_ids = max_ids;
    made->weights = malloc(blocks * BLOCK * sizeof *made->weights);
    made->sums = malloc(blocks * sizeof *made->sums);
    made->keys = malloc(ids * sizeof *made->keys);
    made->spare_keys = malloc(ids * sizeof *made->keys);
    made->ids = malloc(ids * sizeof *made->ids);
    made->logits = malloc(ids * sizeof *made->logits);
    made->positions = malloc(ids * sizeof *made->positions);
    bool has_floats = made->weights && made->sums && made->logits;
    if (!has_floats || !made->keys || !made->spare_keys || !made->ids || !made->positions) {
        glm53_sampler_destroy(made);
        return GLM53_NO_MEMORY;
    }
    *sampler = made;
    return GLM53_OK;
}

/* ---- ranking ---- */

static uint64_t key_of(float logit, int32_t index) {
    uint32_t bits = glm53_bits_from_f32(logit + 0.0f); /* minus zero becomes zero */
    uint32_t falling = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    return (uint64_t)falling << 32 | (uint32_t)index;
}

static int32_t index_of(uint64_t key) { return (int32_t)(uint32_t)key; }

/* What counts towards a target: the weight, or 1 without weights. */
static double share_of(const double *weights, uint64_t key) { return weights ? weights[(uint32_t)key] : 1.0; }

/* In four chains: an addition takes longer than finding the next weight. */
static double share_of_all(const double *weights, const uint64_t *keys, int64_t n) {
    if (!weights) return (double)n;
    double sums[4] = {0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        for (int64_t j = 0; j < 4; j++) sums[j] += weights[(uint32_t)keys[i + j]];
    }
    for (; i < n; i++) sums[0] += weights[(uint32_t)keys[i]];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static void sort_few(uint64_t *keys, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        uint64_t key = keys[i];
        int64_t j = i;
        for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
        keys[j] = key;
    }
}

/* A key less than another one of [0, n), n > SAMPLES, near the one where `fraction` of the whole share is
 * reached. */
static uint64_t sampled_pivot(const uint64_t *keys, int64_t n, const double *weights, double fraction) {
    uint64_t sample[SAMPLES];
    double whole = 0.0, sum = 0.0;
    for (int64_t i = 0; i < SAMPLES; i++) {
        sample[i] = keys[i * n / SAMPLES];
        whole += share_of(weights, sample[i]);
    }
    sort_few(sample, SAMPLES);
    int32_t i = 0;
    while (i < SAMPLES - 2 && (sum += share_of(weights, sample[i])) < fraction * whole) i++;
    return sample[i];
}

static uint64_t middle_pivot(const uint64_t *keys, int64_t n) {
    uint64_t least = keys[0], most = keys[0];
    for (int64_t i = 1; i < n; i++) {
        if (keys[i] < least) least = keys[i];
        if (keys[i] > most) most = keys[i];
    }
    return least + (most - least) / 2;
}

/* The last key of the shortest prefix whose shares sum up to `target`; the last of all if rounding leaves
 * them short. sampler->keys[n], n >= 1, all different, are reordered. whole: the sum of all shares.
 * Quickselect (Hoare 1961). */
static uint64_t prefix_end(const glm53_sampler *sampler, int64_t n, const double *weights, double whole,
                           double target) {
    uint64_t *keys = sampler->keys, *right = sampler->spare_keys;
    double before = 0.0;
    for (int32_t step = 0; n > SORTED; step++) {
        uint64_t pivot = step < SAMPLED_STEPS ? sampled_pivot(keys, n, weights, (target - before) / whole)
                                              : middle_pivot(keys, n);
        int64_t num_left = 0, num_right = 0;
        for (int64_t i = 0; i < n; i++) { /* no branch: half of them would be mispredicted */
            uint64_t key = keys[i];
            keys[num_left] = key;
            right[num_right] = key;
            num_left += key <= pivot;
            num_right += key > pivot;
        }
        double left = share_of_all(weights, keys, num_left);
        if (before + left >= target) {
            n = num_left;
            whole = left;
        } else {
            uint64_t *emptied = keys;
            keys = right;
            right = emptied;
            n = num_right;
            before += left;
            whole -= left;
        }
    }
    sort_few(keys, n);
    for (int64_t i = 0; i < n; i++) {
        before += share_of(weights, keys[i]);
        if (before >= target) return keys[i];
    }
    return keys[n - 1];
}

/* A logit that at least `count` of n reach: the count-th largest of the groups' maxima. */
static float bound_of_top(glm53_sampler *sampler, const float *logits, int32_t n, int32_t count) {
    int32_t groups = count > GROUPS ? 8 * GROUPS : GROUPS, size = n / groups;
    if (count > groups || size < 2) return -INFINITY;
    float *maxima = sampler->logits;
    memcpy(maxima, logits, (size_t)groups * sizeof *maxima);
    for (int32_t i = 1; i < size; i++) {
        const float *x = logits + (size_t)i * (size_t)groups;
        for (int32_t j = 0; j < groups; j++) maxima[j] = x[j] > maxima[j] ? x[j] : maxima[j];
    }
    for (int32_t j = 0; j < groups; j++) sampler->keys[j] = key_of(maxima[j], j);
    return maxima[index_of(prefix_end(sampler, groups, NULL, groups, count))];
}

static bool has_any_from(const float *logits, int32_t n, float bound) {
    int32_t any = 0;
    for (int32_t i = 0; i < n; i++) any |= logits[i] >= bound;
    return any;
}

/* Write the ids of the logits from `bound` on, ascending; give how many they are. */
static int32_t choose_from(int32_t *ids, const float *logits, int32_t n, float bound) {
    int32_t found = 0;
    for (int32_t begin = 0; begin < n; begin += RUN) {
        int32_t end = n - begin < RUN ? n : begin + RUN;
        if (!has_any_from(logits + begin, end - begin, bound)) continue;
        for (int32_t i = begin; i < end; i++) {
            ids[found] = i;
            found += logits[i] >= bound;
        }
    }
    return found;
}

/* Write the first `count` ids of the ranking into sampler->ids, ascending. 1 <= count <= n. */
static void choose_top(glm53_sampler *sampler, const float *logits, int32_t n, int32_t count) {
    int32_t *ids = sampler->ids, kept = 0;
    int32_t found = choose_from(ids, logits, n, bound_of_top(sampler, logits, n, count));
    for (int32_t i = 0; i < found; i++) sampler->keys[i] = key_of(logits[ids[i]], ids[i]);
    uint64_t border = found ? prefix_end(sampler, found, NULL, found, count) : 0;
    for (int32_t i = 0; i < found && kept < count; i++) {
        int32_t id = ids[i];
        ids[kept] = id;
        kept += key_of(logits[id], id) <= border;
    }
    for (; kept < count; kept++) ids[kept] = kept; /* NaNs, which the caller should have refused */
}

/* ---- weights ---- */

static int32_t num_blocks(int32_t n) { return (n + BLOCK - 1) / BLOCK; }

static double sum_of(const double *values, int32_t count) {
    double sum = 0.0;
    for (int32_t i = 0; i < count; i++) sum += values[i];
    return sum;
}

/* Make keys of the weights from `least` on, which is above zero, by ascending position; give how many they
 * are. */
static int32_t choose_heavy(glm53_sampler *sampler, const float *logits, int32_t n, double least) {
    int32_t *positions = sampler->positions, found = 0;
    for (int32_t block = 0; block < num_blocks(n); block++) {
        if (sampler->sums[block] < least) continue; /* then each of its weights is */
        int32_t end = n - block * BLOCK < BLOCK ? n : (block + 1) * BLOCK;
        for (int32_t i = block * BLOCK; i < end; i++) {
            positions[found] = i;
            found += sampler->weights[i] >= least;
        }
    }
    for (int32_t i = 0; i < found; i++) sampler->keys[i] = key_of(logits[positions[i]], positions[i]);
    return found;
}

/* Write the positions of the shortest prefix of the ranking that holds top_p of the weight; give their
 * number.
 *
 * At most 1024 weights are 1/1024 of the total or more, and in a row as models give them those suffice.
 * Otherwise those from (1 - top_p) / n of the total on do, for all others together hold less than 1 - top_p.
 */
static int32_t choose_top_p(glm53_sampler *sampler, const float *logits, int32_t n, double total,
                            double top_p) {
    double target = top_p * total, least = (1.0 - top_p) * total / n, mass = 0.0;
    int32_t *positions = sampler->positions, found = 0, kept = 0;
    if (least < total / HEAVY) {
        found = choose_heavy(sampler, logits, n, total / HEAVY);
        mass = share_of_all(sampler->weights, sampler->keys, found);
    }
    if (mass < target) {
        found = choose_heavy(sampler, logits, n, least);
        mass = share_of_all(sampler->weights, sampler->keys, found);
    }
    if (found == 0) return 0; /* logits that the caller should have refused */
    uint64_t border = prefix_end(sampler, found, sampler->weights, mass, target);
    for (int32_t i = 0; i < found; i++) {
        int32_t position = positions[i];
        positions[kept] = position;
        kept += key_of(logits[position], position) <= border;
    }
    return kept;
}

/* ---- draw: the inverse of the cumulative weights. `u * total` may round up to the total: the last one then
 * ---- */

static int32_t draw_any(const glm53_sampler *sampler, int32_t n, double total, double u) {
    double before = 0.0, sum = 0.0;
    int32_t block = 0, chosen = 0;
    for (int32_t i = 0; i < num_blocks(n) && sum <= u * total; i++) {
        if (sampler->sums[i] == 0.0) continue;
        block = i;
        before = sum;
        sum += sampler->sums[i];
    }
    for (int32_t i = block * BLOCK; i < n && i < (block + 1) * BLOCK && before <= u * total; i++) {
        if (sampler->weights[i] == 0.0) continue;
        chosen = i;
        before += sampler->weights[i];
    }
    return chosen;
}

static int32_t draw_chosen(const glm53_sampler *sampler, int32_t count, double min_p, double u) {
    double total = 0.0, before = 0.0;
    int32_t kept = 0, chosen = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t position = sampler->positions[i];
        double weight = sampler->weights[position];
        if (weight < min_p) continue;
        sampler->positions[kept++] = position;
        total += weight;
    }
    for (int32_t i = 0; i < kept && before <= u * total; i++) {
        chosen = sampler->positions[i];
        before += sampler->weights[chosen];
    }
    return chosen;
}

static bool is_share(double value) { return value >= 0.0 && value <= 1.0; }

int32_t glm53_sampler_draw(glm53_sampler *sampler, const float *logits, int32_t num_ids, float largest,
                           const glm53_filters *filters, double u, int32_t *id) {
    if (!sampler || !logits || !filters || !id) return GLM53_BAD_ARGUMENT;
    if (num_ids < 1 || num_ids > sampler->max_ids || !(u >= 0.0 && u < 1.0)) return GLM53_BAD_ARGUMENT;
    if (!(filters->temperature > 0.0) || filters->top_k < 0) return GLM53_BAD_ARGUMENT;
    if (!is_share(filters->top_p) || !is_share(filters->min_p)) return GLM53_BAD_ARGUMENT;
    /* So small a temperature leaves the largest logits alone, as any smaller one, whose inverse is infinite.
     */
    double slope = 1.0 / fmax(filters->temperature, 1e-300);
    bool has_top_k = filters->top_k > 0 && filters->top_k < num_ids, has_top_p = filters->top_p < 1.0;
    int32_t n = num_ids;
    if (has_top_k) {
        n = filters->top_k;
        choose_top(sampler, logits, num_ids, n);
        for (int32_t i = 0; i < n; i++) sampler->logits[i] = logits[sampler->ids[i]];
        logits = sampler->logits;
    }
    double least = has_top_p ? 0.0 : filters->min_p; /* top_p counts what min_p drops */
    sampler->tier->weigh(logits, n, largest, slope, least, sampler->weights, sampler->sums);
    double total = sum_of(sampler->sums, num_blocks(n));
    int32_t position;
    if (has_top_p) {
        int32_t count = choose_top_p(sampler, logits, n, total, filters->top_p);
        position = draw_chosen(sampler, count, filters->min_p, u);
    } else {
        position = draw_any(sampler, n, total, u);
    }
    *id = has_top_k ? sampler->ids[position] : position;
    return GLM53_OK;
}

int32_t glm53_sampler_total(glm53_sampler *sampler, const float *logits, int32_t num_ids, float largest,
                            double *total) {
    if (!sampler || !logits || !total || num_ids < 1 || num_ids > sampler->max_ids) return GLM53_BAD_ARGUMENT;
    sampler->tier->weigh(logits, num_ids, largest, 1.0, 0.0, sampler->weights, sampler->sums);
    *total = sum_of(sampler->sums, num_blocks(num_ids));
    return GLM53_OK;
}

int32_t glm53_sampler_top(glm53_sampler *sampler, const float *logits, int32_t num_ids, int32_t count,
                          int32_t *ids) {
    if (!sampler || !logits || !ids || num_ids < 1 || num_ids > sampler->max_ids) return GLM53_BAD_ARGUMENT;
    if (count < 1 || count > num_ids) return GLM53_BAD_ARGUMENT;
    choose_top(sampler, logits, num_ids, count);
    memcpy(ids, sampler->ids, (size_t)count * sizeof *ids);
    return GLM53_OK;
}
