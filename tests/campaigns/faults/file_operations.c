// Preloaded into a process: counts the operations that change files below a folder, and kills the process at one of
// them. Every library of the process is seen, whatever language it is written in: all of them call libc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_len; // 0: nothing is watched
static long last, count;
static bool after_half;
static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Each operation below `path` from now on adds a line to `log`. The process is killed before number `at`, or, if that
// is a write and `half`, in the middle of it.
void watch_file_operations(const char *path, long at, int half, const char *log) {
    log_fd = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    last = at, count = 0, after_half = half;
    folder_len = strlen(strncpy(folder, path, sizeof(folder) - 1));
}

// Counts an operation on a path, relative to the folder that `dir` is open on. Returns whether to kill the process in
// the middle of it.
static bool before(const char *operation, int dir, const char *path) {
    if (folder_len == 0) return false;
    char link[64], at[PATH_MAX] = "", full[2 * PATH_MAX], line[3 * PATH_MAX];
    if (path == NULL || path[0] != '/') {
        snprintf(link, sizeof(link), dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
        const ssize_t length = readlink(link, at, sizeof(at) - 1);
        at[length < 0 ? 0 : length] = 0;
    }
    snprintf(full, sizeof(full), "%s%s%s", at, at[0] && path ? "/" : "", path ? path : "");
    if (strncmp(full, folder, folder_len) != 0) return false;
    pthread_mutex_lock(&lock);
    const long number = count++;
    const int length = snprintf(line, sizeof(line), "%s %s\n", operation, full + folder_len);
    static ssize_t (*next)(int, const void *, size_t);
    if (next == NULL) *(void **)&next = dlsym(RTLD_NEXT, "write");
    if (next(log_fd, line, (size_t)length) != length) kill(getpid(), SIGABRT);
    const bool write_half = number == last && after_half && strcmp(operation, "write") == 0;
    if (number == last && !write_half) kill(getpid(), SIGKILL);
    pthread_mutex_unlock(&lock);
    return write_half;
}

static void die(void) { kill(getpid(), SIGKILL); }

#define NEXT(result, name, ...)                                                                                        \
    static result (*next)(__VA_ARGS__);                                                                                \
    if (next == NULL) *(void **)&next = dlsym(RTLD_NEXT, __func__)

// ---- files -------------------------------------------------------------------------------------------------

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        NEXT(int, name, const char *, int, ...);                                                                       \
        va_list arguments;                                                                                             \
        va_start(arguments, flags);                                                                                    \
        const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;                                           \
        va_end(arguments);                                                                                             \
        if ((flags & O_ACCMODE) != O_RDONLY) before("open", AT_FDCWD, path);                                           \
        return next(path, flags, mode);                                                                                \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int dir, const char *path, int flags, ...) {                                                              \
        NEXT(int, name, int, const char *, int, ...);                                                                  \
        va_list arguments;                                                                                             \
        va_start(arguments, flags);                                                                                    \
        const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;                                           \
        va_end(arguments);                                                                                             \
        if ((flags & O_ACCMODE) != O_RDONLY) before("open", dir, path);                                                \
        return next(dir, path, flags, mode);                                                                           \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                                                    \
    FILE *name(const char *path, const char *mode) {                                                                   \
        NEXT(FILE *, name, const char *, const char *);                                                                \
        if (mode[0] != 'r' || strchr(mode, '+')) before("open", AT_FDCWD, path);                                       \
        return next(path, mode);                                                                                       \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int fd, const void *bytes, size_t length) {
    NEXT(ssize_t, write, int, const void *, size_t);
    if (before("write", fd, NULL)) next(fd, bytes, length / 2), die();
    return next(fd, bytes, length);
}

ssize_t writev(int fd, const struct iovec *parts, int num_parts) {
    NEXT(ssize_t, writev, int, const struct iovec *, int);
    if (before("write", fd, NULL)) next(fd, parts, num_parts / 2), die();
    return next(fd, parts, num_parts);
}

#define PWRITE(name)                                                                                                   \
    ssize_t name(int fd, const void *bytes, size_t length, off_t at) {                                                 \
        NEXT(ssize_t, name, int, const void *, size_t, off_t);                                                         \
        if (before("write", fd, NULL)) next(fd, bytes, length / 2, at), die();                                         \
        return next(fd, bytes, length, at);                                                                            \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define RESIZE(name)                                                                                                   \
    int name(int fd, off_t length) {                                                                                   \
        NEXT(int, name, int, off_t);                                                                                   \
        before("resize", fd, NULL);                                                                                    \
        return next(fd, length);                                                                                       \
    }
RESIZE(ftruncate)
RESIZE(ftruncate64)

int fsync(int fd) {
    NEXT(int, fsync, int);
    before("fsync", fd, NULL);
    return next(fd);
}

// ---- names -------------------------------------------------------------------------------------------------

int rename(const char *from, const char *to) {
    NEXT(int, rename, const char *, const char *);
    before("rename", AT_FDCWD, from);
    return next(from, to);
}

#define ON_PATH(name, operation)                                                                                       \
    int name(const char *path) {                                                                                       \
        NEXT(int, name, const char *);                                                                                 \
        before(operation, AT_FDCWD, path);                                                                             \
        return next(path);                                                                                             \
    }
ON_PATH(unlink, "remove")
ON_PATH(rmdir, "remove")

int unlinkat(int dir, const char *path, int flags) {
    NEXT(int, unlinkat, int, const char *, int);
    before("remove", dir, path);
    return next(dir, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(int, mkdir, const char *, mode_t);
    before("mkdir", AT_FDCWD, path);
    return next(path, mode);
}
