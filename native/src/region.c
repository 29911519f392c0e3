/* Large mappings for the experts' home and the mailbox. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

/* Size of a huge page on x86-64 and on arm64 with 4 KiB pages; the alignment that transparent ones need. */
#define HUGE_BYTES ((size_t)2 << 20)

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static void *map_huge(size_t bytes) {
#if defined(MAP_HUGETLB)
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    return base == MAP_FAILED ? NULL : base;
#else
    (void)bytes;
    errno = ENOSYS;
    return NULL;
#endif
}

/* Map a huge page more than asked for, and give back what lies outside the aligned part. */
static void *map_aligned(size_t bytes) {
    size_t wide = bytes + HUGE_BYTES;
    char *start = mmap(NULL, wide, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return NULL;
    char *base = (char *)round_up((size_t)start, HUGE_BYTES);
    size_t before = (size_t)(base - start), after = wide - before - bytes;
    if (before) munmap(start, before);
    if (after) munmap(base + bytes, after);
    return base;
}

static bool wants_transparent(void *base, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    return madvise(base, bytes, MADV_HUGEPAGE) == 0;
#else
    (void)base;
    (void)bytes;
    errno = ENOSYS;
    return false;
#endif
}

int32_t glm53_region_map(int64_t num_bytes, int32_t pages, glm53_region *region) {
    if (!region) return GLM53_BAD_ARGUMENT;
    *region = (glm53_region){0};
    if (num_bytes < 1 || num_bytes > INT64_MAX / 2) return GLM53_BAD_ARGUMENT;
    if (pages < GLM53_PAGES_PLAIN || pages > GLM53_PAGES_HUGE) return GLM53_BAD_ARGUMENT;
    size_t huge_bytes = round_up((size_t)num_bytes, HUGE_BYTES);
    region->num_bytes = num_bytes;
    region->mapped_bytes = (int64_t)huge_bytes;
    region->pages = GLM53_PAGES_HUGE;
    if (pages == GLM53_PAGES_HUGE) {
        region->base = map_huge(huge_bytes);
        if (region->base) return GLM53_OK;
        region->refusal = errno;
    }
    size_t bytes = round_up((size_t)num_bytes, (size_t)sysconf(_SC_PAGESIZE));
    region->mapped_bytes = (int64_t)bytes;
    region->base = map_aligned(bytes);
    if (!region->base) {
        *region = (glm53_region){.refusal = errno};
        return GLM53_NO_MEMORY;
    }
    region->pages = GLM53_PAGES_PLAIN;
    if (pages == GLM53_PAGES_PLAIN) return GLM53_OK;
    if (wants_transparent(region->base, bytes)) {
        region->pages = GLM53_PAGES_TRANSPARENT;
    } else {
        region->refusal = errno;
    }
    return GLM53_OK;
}

int32_t glm53_region_lock(const glm53_region *region, int32_t *error) {
    if (!region || !region->base || !error) return GLM53_BAD_ARGUMENT;
    *error = 0;
    if (mlock(region->base, (size_t)region->mapped_bytes) == 0) return GLM53_OK;
    *error = errno;
    return GLM53_NO_MEMORY;
}

void glm53_region_unmap(glm53_region *region) {
    if (!region || !region->base) return;
    munmap(region->base, (size_t)region->mapped_bytes);
    *region = (glm53_region){0};
}
