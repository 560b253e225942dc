/* remote.c with the functions of a library for macOS on arm64, whose file is its argument: what zig builds for Macs computes under
 * Linux, and so under qemu. Loads what the linker of zig writes (mach-o/loader.h, LC_DYLD_INFO_ONLY), and no more than that. */
#define _GNU_SOURCE
#define main serve
#include "remote.c"
#undef main
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { SEGMENT = 0x19, SYMBOLS = 2, DYLD_INFO = (int)0x80000022, INITIALISERS = 9, EXPORTED = 0x0f, DEFINED_THERE = 0x0e };

static char *base; /* where address 0 of the file has been mapped */

static int apples_clock(int clock, struct timespec *now) { return clock_gettime(clock == 6 ? CLOCK_MONOTONIC : CLOCK_REALTIME, now); }
static void *checked_copy(void *to, const void *from, size_t size, size_t room) { return size <= room ? memcpy(to, from, size) : 0; }
static void zero(void *to, size_t size) { memset(to, 0, size); }
static void fill(void *to, const void *pattern, size_t size)
{
    for (size_t at = 0; at < size; at++)
        ((char *)to)[at] = ((const char *)pattern)[at % 16];
}

/* Mutexes and conditions of macOS are as large as those of musl, or larger. */
static const struct {
    const char *name;
    void *is;
} imports[] = {
    {"_clock_gettime", apples_clock}, {"___memcpy_chk", checked_copy}, {"_bzero", zero}, {"_memset_pattern16", fill},
#define SAME(name) {"_" #name, name}
    SAME(memcpy), SAME(memmove), SAME(memset), SAME(memcmp), SAME(aligned_alloc), SAME(calloc), SAME(free), SAME(malloc), SAME(realloc),
    SAME(pthread_cond_broadcast), SAME(pthread_cond_destroy), SAME(pthread_cond_init), SAME(pthread_cond_wait), SAME(pthread_create),
    SAME(pthread_join), SAME(pthread_mutex_destroy), SAME(pthread_mutex_init), SAME(pthread_mutex_lock), SAME(pthread_mutex_unlock),
    SAME(sched_yield),
};

static void *import(const char *name)
{
    for (size_t i = 0; i < sizeof imports / sizeof *imports; i++)
        if (!strcmp(imports[i].name, name))
            return imports[i].is;
    if (strcmp(name, "dyld_stub_binder")) { /* called by none: all is bound at once */
        fprintf(stderr, "the library wants %s\n", name);
        exit(1);
    }
    return 0;
}

static uint64_t number(const uint8_t **at) /* ULEB128 */
{
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        value |= (uint64_t)(**at & 127) << shift;
        if (!(*(*at)++ & 128))
            return value;
    }
}

static uint64_t segments[16]; /* their addresses in the file */

static void rebase(const uint8_t *at, const uint8_t *end)
{
    uint64_t to = 0, count = 0, skip = 0;
    while (at < end) {
        int low = *at & 15, step = *at++ >> 4;
        if (step == 2)
            to = segments[low] + number(&at);
        else if (step == 3)
            to += number(&at);
        else if (step == 4)
            to += 8 * (uint64_t)low;
        count = step == 5 ? (uint64_t)low : step == 6 || step == 8 ? number(&at) : step == 7;
        skip = step == 7 || step == 8 ? number(&at) : 0;
        for (; count > 0; count--, to += 8 + skip)
            *(uint64_t *)(base + to) += (uint64_t)base;
    }
}

static void bind(const uint8_t *at, const uint8_t *end)
{
    const char *name = "";
    uint64_t to = 0, count = 0, skip = 0;
    while (at < end) {
        int low = *at & 15, step = *at++ >> 4;
        if (step == 2)
            (void)number(&at);
        else if (step == 4)
            name = (const char *)at, at += strlen(name) + 1;
        else if (step == 7)
            to = segments[low] + number(&at);
        else if (step == 8)
            to += number(&at);
        count = step >= 9 && step <= 11 ? 1 : step == 12 ? number(&at) : 0;
        skip = step == 10 || step == 12 ? number(&at) : step == 11 ? 8 * (uint64_t)low : 0;
        for (; count > 0; count--, to += 8 + skip)
            *(void **)(base + to) = import(name);
    }
}

/* A place for each function, and a jump there. */
#define PLACE(name) void (*at_##name)(void);
FUNCTIONS(PLACE)
#define JUMP(name) __asm__(".globl " #name "\n" #name ": adrp x16, at_" #name "\n ldr x16, [x16, :lo12:at_" #name "]\n br x16\n");
FUNCTIONS(JUMP)
#define LISTED(name) {"_" #name, &at_##name},
static const struct {
    const char *name;
    void (**at)(void);
} wanted[] = {FUNCTIONS(LISTED)};

static uint32_t word(const char *at) { return *(const uint32_t *)at; }
static uint64_t words(const char *at) { return *(const uint64_t *)at; }

static void load(const char *file)
{
    const char *symbols = 0, *info = 0, *command = file + 32, *initialisers[4];
    uint64_t sizes[4];
    int count = 0, num = 0;
    base = mmap(0, 64 << 20, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (uint32_t i = 0; i < word(file + 16); i++, command += word(command + 4)) {
        if (word(command) == SYMBOLS)
            symbols = command;
        if (word(command) == (uint32_t)DYLD_INFO)
            info = command;
        if (word(command) != SEGMENT)
            continue;
        segments[num++] = words(command + 24);
        memcpy(base + words(command + 24), file + words(command + 40), words(command + 48));
        for (uint32_t s = 0; s < word(command + 64); s++) {
            const char *section = command + 72 + 80 * s;
            if ((word(section + 64) & 255) == INITIALISERS)
                initialisers[count] = base + words(section + 32), sizes[count++] = words(section + 40);
        }
    }
    const uint8_t *bytes = (const uint8_t *)file;
    rebase(bytes + word(info + 8), bytes + word(info + 8) + word(info + 12));
    for (int kind = 16; kind <= 32; kind += 8) /* bound, weakly, lazily */
        bind(bytes + word(info + kind), bytes + word(info + kind) + word(info + kind + 4));
    for (uint32_t s = 0; s < word(symbols + 12); s++) {
        const char *symbol = file + word(symbols + 8) + 16 * s, *name = file + word(symbols + 16) + word(symbol);
        for (size_t i = 0; (symbol[4] & EXPORTED) == (DEFINED_THERE | 1) && i < sizeof wanted / sizeof *wanted; i++)
            if (!strcmp(name, wanted[i].name))
                *wanted[i].at = (void (*)(void))(base + words(symbol + 8));
    }
    __builtin___clear_cache(base, base + (64 << 20));
    for (int i = 0; i < count; i++)
        for (uint64_t at = 0; at < sizes[i]; at += 8)
            (*(void (**)(void))(initialisers[i] + at))();
}

int main(int argc, char **argv)
{
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : 0;
    static char content[16 << 20];
    if (!file || fread(content, 1, sizeof content, file) < 1024)
        return 1;
    fclose(file);
    load(content);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!*wanted[i].at)
            return fprintf(stderr, "the library has no %s\n", wanted[i].name), 1;
    return serve();
}
