/* Closes what avx2_begin.h or avx512_begin.h opened. */
#undef INLINE

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
