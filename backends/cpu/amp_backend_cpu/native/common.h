/* What the files of this library share. */
#ifndef AMP_COMMON_H
#define AMP_COMMON_H

#define SCALAR 0
#define GENERIC 1
#define SSE2 2
#define AVX2 3
#define AVX512 4
#define F16C 5 /* SSE2's width, with the conversions of float16 that torch uses at any capability */

#if defined(__GNUC__) && !defined(AMP_SCALAR)
#define VECTORS 1
#if defined(__x86_64__)
#define X86 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define NEON 1
#include <arm_neon.h>
#endif
#endif

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#else
#define INLINE static __forceinline
#define NOINLINE __declspec(noinline)
#endif
#ifdef _MSC_VER
#define OMP(...) __pragma(omp __VA_ARGS__)
#define EXPORT __declspec(dllexport)
#else
#define PRAGMA(text) _Pragma(#text)
#define OMP(...) PRAGMA(omp __VA_ARGS__)
#define EXPORT __attribute__((visibility("default")))
#endif

int amp_level(void);      /* the instruction set in use: 2 AVX-512, 1 AVX2, else less */
int amp_may_thread(void); /* 0 after a fork */

#endif
