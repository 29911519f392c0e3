/* Which instruction sets there are, what a status means, and whether a matrix makes sense. */
#include "internal.h"

#ifdef GLM53_HAS_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static bool has_avx2(void) {
    unsigned a, b, c, d;
    /* The built-in looks at the operating system's part, too; it has no name for F16C in older compilers. */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* Ice Lake, Zen 4 and later. A CPU with some of AVX-512 but not all of these takes AVX2. */
static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
}

#ifdef GLM53_HAS_AMX
/* Sapphire Rapids and later. Linux (5.16) lets a process use tiles that asks for it; once asked, all threads
 * may, and asking again changes nothing. Refused under a virtual machine or a seccomp filter that does not
 * know the call, or where a thread has an alternative signal stack without room for 8 KiB of tiles. */
static bool has_amx(void) {
    if (!has_avx512()) return false;
#ifdef GLM53_AMX_EMULATED
    return true;
#else
    enum { AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_TILE) || !(d & AMX_INT8)) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
}
#endif
#endif

const char *glm53_status_text(int32_t status) {
    switch (status) {
        case GLM53_OK:
            return "ok";
        case GLM53_BAD_ARGUMENT:
            return "an argument is null or out of range";
        case GLM53_BAD_SHAPE:
            return "features must be positive multiples of 128 that fit together";
        case GLM53_BAD_CODEBOOK:
            return "unknown codebook, or bits per weight that it does not have";
        case GLM53_BAD_PICK:
            return "a pick is neither -1 nor an expert of the table";
        case GLM53_NO_MEMORY:
            return "out of memory";
        case GLM53_NO_THREAD:
            return "a worker thread could not be started";
        case GLM53_NO_ISA:
            return "this CPU or this build lacks the instruction set";
        case GLM53_BUSY:
            return "the pool is running another job";
        case GLM53_STALLED:
            return "the CPU workers did not answer in time";
        case GLM53_FULL:
            return "the mailbox has no free cell";
        default:
            return "unknown status";
    }
}

const glm53_tier *glm53_find_tier(int32_t isa) {
    if (isa == GLM53_ISA_SCALAR) return &glm53_tier_scalar;
#ifdef GLM53_HAS_AMX
    if ((isa == GLM53_ISA_AMX || isa == GLM53_ISA_AUTO) && has_amx()) return &glm53_tier_amx;
#endif
#ifdef GLM53_HAS_X86
    if ((isa == GLM53_ISA_AVX512 || isa == GLM53_ISA_AUTO) && has_avx512()) return &glm53_tier_avx512;
    if ((isa == GLM53_ISA_AVX2 || isa == GLM53_ISA_AUTO) && has_avx2()) return &glm53_tier_avx2;
#endif
    return isa == GLM53_ISA_AUTO ? &glm53_tier_scalar : NULL;
}

uint32_t glm53_isa_mask(void) {
    uint32_t mask = 0;
    for (int32_t isa = GLM53_ISA_SCALAR; isa <= GLM53_ISA_AMX; isa++) {
        if (glm53_find_tier(isa)) mask |= 1u << isa;
    }
    return mask;
}

int32_t glm53_matrix_check(const glm53_matrix *matrix) {
    if (!matrix || !matrix->trellis || !matrix->suh || !matrix->svh) return GLM53_BAD_ARGUMENT;
    if (matrix->in_features < GLM53_BLOCK || matrix->in_features % GLM53_BLOCK) return GLM53_BAD_SHAPE;
    if (matrix->out_features < GLM53_BLOCK || matrix->out_features % GLM53_BLOCK) return GLM53_BAD_SHAPE;
    int32_t bits_x2 = matrix->bits_x2;
    bool is_mul1 = matrix->codebook == GLM53_CODEBOOK_MUL1;
    if (matrix->codebook < GLM53_CODEBOOK_DEFAULT || matrix->codebook > GLM53_CODEBOOK_MUL1) {
        return GLM53_BAD_CODEBOOK;
    }
    if (bits_x2 >= 2 && bits_x2 <= 16 && bits_x2 % 2 == 0) return GLM53_OK;
    return is_mul1 && (bits_x2 == 3 || bits_x2 == 5 || bits_x2 == 7) ? GLM53_OK : GLM53_BAD_CODEBOOK;
}
