/* The modes in which everything here computes: round to nearest even, denormal operands and results are zero. */
#ifndef MANYHANDS_MODES_H
#define MANYHANDS_MODES_H
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
static inline uint64_t modes_enter(void)
{
    uint64_t before = _mm_getcsr();
    _mm_setcsr(0x1F80 | 0x8040); /* no traps, nearest even, flush to zero, denormals are zero */
    return before;
}
static inline void modes_leave(uint64_t before) { _mm_setcsr((unsigned)before); }
#elif defined(__aarch64__)
static inline uint64_t modes_enter(void)
{
    uint64_t before, now = 1u << 24; /* FZ: no traps, nearest even, flush to zero */
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(now) : "memory");
    return before;
}
static inline void modes_leave(uint64_t before) { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
#else
#error "manyhands' engine needs x86-64 or aarch64"
#endif
#endif
