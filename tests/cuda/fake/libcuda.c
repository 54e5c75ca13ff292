/*
 * A libcuda.so.1 for tests: the entry points that HPKV calls, without a GPU.
 *
 * Device memory is files in $FAKE_CUDA, which processes open by handle as CUDA IPC does. Device pointers are addresses
 * with one more bit, so that nobody reads device memory past the driver. What is put into a stream happens when
 * somebody looks at an event, and not before $FAKE_CUDA_DELAY_US have passed; copies of a batch happen backwards.
 * Anything that the real driver refuses or leaves undefined is an error here: host memory that is not page-locked, ranges
 * that leave an allocation, handles opened by their own process, pages that are mapped in part or without access.
 *
 * $FAKE_CUDA/devices has one line for each device: UUID, bytes. Two UUIDs (whole, part) for a MIG device.
 * $FAKE_CUDA_FAULTS names a file with lines "FUNCTION N RESULT": the N-th call from now fails, every one if N is 0.
 * $FAKE_CUDA_VERSION is the driver's version, 12080 if unset: earlier ones have no batch copy.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED_ = 205,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999
};

#define TAG (1ULL << 60)
#define MOST 4096
#define PAGE (2UL << 20)

typedef uint64_t pointer;
typedef struct {
    char bytes[64];
} handle;
typedef struct {
    char bytes[16];
} uuid;

struct device {
    char whole[64], part[64];
    size_t bytes;
};
struct physical { /* memory without an address: freed when no handle, no mapping and no descriptor is left */
    int fd, device, types, handles, mappings;
    size_t size;
};
struct area {
    char *start;
    size_t size;
    int device, fd, opened, access;
    char name[64];
    struct physical *pages; /* under a mapping page by page; those have no handle of the old kind */
};
struct operation {
    struct operation *next;
    char *to;
    const char *from;
    size_t size;
    int fill; /* -1: copy */
    struct event *event;
    uint64_t due;
};
struct stream {
    struct operation *first, *last;
    struct stream *next;
};
struct event {
    unsigned recorded, passed;
};
struct rule {
    char name[48];
    long nth, calls;
    int result;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[8];
static int device_count, initialised;
static struct area areas[MOST], pinned[MOST], reserved[MOST];
static struct stream *streams;
static struct rule rules[16];
static int rule_count;
static struct timespec rules_of;
static __thread int current; /* device + 1 */

static void advance(int all);

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000ULL + t.tv_nsec / 1000;
}

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

/* -- faults ------------------------------------------------------------------------------------------------------ */

static void read_rules(const char *path) {
    struct stat found;
    if (stat(path, &found)) {
        rule_count = 0;
        memset(&rules_of, 0, sizeof rules_of);
        return;
    }
    if (!memcmp(&found.st_mtim, &rules_of, sizeof rules_of))
        return;
    rules_of = found.st_mtim;
    rule_count = 0;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    struct rule *rule = rules;
    while (rule_count < 16 && fscanf(file, "%47s %ld %d", rule->name, &rule->nth, &rule->result) == 3) {
        rule->calls = 0;
        rule++, rule_count++;
    }
    fclose(file);
}

static int fault(const char *name) {
    const char *path = getenv("FAKE_CUDA_FAULTS");
    int result = OK;
    if (!path)
        return OK;
    pthread_mutex_lock(&lock);
    read_rules(path);
    for (int i = 0; i < rule_count; i++)
        if (!strcmp(rules[i].name, name) && (++rules[i].calls == rules[i].nth || !rules[i].nth))
            result = rules[i].result;
    pthread_mutex_unlock(&lock);
    return result;
}

#define ENTER(name)                                                                                                    \
    do {                                                                                                               \
        int fault_ = fault(name);                                                                                      \
        if (fault_)                                                                                                    \
            return fault_;                                                                                             \
        if (!initialised)                                                                                              \
            return NOT_INITIALIZED;                                                                                    \
    } while (0)
#define ENTER_CONTEXT(name)                                                                                            \
    ENTER(name);                                                                                                       \
    if (!current)                                                                                                      \
    return INVALID_CONTEXT

int cuGetErrorName(int result, const char **name) {
    static const struct {
        int result;
        const char *name;
    } names[] = {
        {1, "CUDA_ERROR_INVALID_VALUE"},
        {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {3, "CUDA_ERROR_NOT_INITIALIZED"},
        {4, "CUDA_ERROR_DEINITIALIZED"},
        {100, "CUDA_ERROR_NO_DEVICE"},
        {101, "CUDA_ERROR_INVALID_DEVICE"},
        {201, "CUDA_ERROR_INVALID_CONTEXT"},
        {205, "CUDA_ERROR_MAP_FAILED"},
        {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
        {400, "CUDA_ERROR_INVALID_HANDLE"},
        {401, "CUDA_ERROR_ILLEGAL_STATE"},
        {500, "CUDA_ERROR_NOT_FOUND"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
        {711, "CUDA_ERROR_TOO_MANY_PEERS"},
        {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {714, "CUDA_ERROR_HARDWARE_STACK_ERROR"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"},
        {800, "CUDA_ERROR_NOT_PERMITTED"},
        {801, "CUDA_ERROR_NOT_SUPPORTED"},
        {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
        {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
        {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
        {999, "CUDA_ERROR_UNKNOWN"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].result == result) {
            *name = names[i].name;
            return OK;
        }
    *name = NULL;
    return INVALID_VALUE;
}

/* -- devices ----------------------------------------------------------------------------------------------------- */

static int visible(const struct device *device, int ordinal) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    char number[16], copy[1024], *rest, *word;
    if (!list)
        return 1;
    snprintf(number, sizeof number, "%d", ordinal);
    snprintf(copy, sizeof copy, "%s", list);
    for (word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
        if (!strcmp(word, number) || !strcmp(word, device->part))
            return 1;
    return 0;
}

int cuInit(unsigned flags) {
    char path[512], line[256];
    int ordinal = 0, result = fault("cuInit");
    if (flags)
        return INVALID_VALUE;
    if (result)
        return result;
    if (initialised)
        return OK;
    snprintf(path, sizeof path, "%s/devices", setting("FAKE_CUDA", "/nonexistent"));
    FILE *file = fopen(path, "r");
    if (!file)
        return NO_DEVICE;
    while (device_count < 8 && fgets(line, sizeof line, file)) {
        struct device *device = devices + device_count;
        char second[64] = "";
        int words = sscanf(line, "%63s %63s %zu", device->whole, second, &device->bytes);
        snprintf(device->part, sizeof device->part, "%s", second);
        if (words == 2) {
            device->bytes = strtoull(second, NULL, 10);
            snprintf(device->part, sizeof device->part, "%s", device->whole);
        }
        if (words >= 2 && visible(device, ordinal++))
            device_count++;
    }
    fclose(file);
    if (!device_count)
        return NO_DEVICE;
    initialised = 1;
    return OK;
}

int cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount");
    *count = device_count;
    return OK;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER("cuDeviceGet");
    if (ordinal < 0 || ordinal >= device_count)
        return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

static void put_uuid(uuid *to, const char *text) {
    unsigned byte;
    int count = 0;
    for (text += 4; *text && count < 16; text++)
        if (*text != '-' && sscanf(text, "%2x", &byte) == 1)
            to->bytes[count++] = (char)byte, text++;
}

int cuDeviceGetUuid(uuid *to, int device) {
    ENTER("cuDeviceGetUuid");
    put_uuid(to, devices[device].whole);
    return OK;
}

int cuDeviceGetUuid_v2(uuid *to, int device) {
    ENTER("cuDeviceGetUuid_v2");
    put_uuid(to, devices[device].part);
    return OK;
}

int cuDeviceGetPCIBusId(char *text, int length, int device) {
    ENTER("cuDeviceGetPCIBusId");
    snprintf(text, length, "0000:FF:%02X.0", device);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    *context = (void *)(intptr_t)(device + 1);
    return OK;
}

int cuCtxSetCurrent(void *context) {
    ENTER("cuCtxSetCurrent");
    current = (int)(intptr_t)context;
    return OK;
}

int cuCtxGetCurrent(void **context) {
    ENTER("cuCtxGetCurrent");
    *context = (void *)(intptr_t)current;
    return OK;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

static struct area *area_of(pointer at, size_t size) {
    char *start = (char *)(at & ~TAG);
    if (!(at & TAG))
        return NULL;
    for (int i = 0; i < MOST; i++)
        if (areas[i].start && start >= areas[i].start && start + size <= areas[i].start + areas[i].size)
            return areas + i;
    return NULL;
}

static struct area *free_area(void) {
    for (int i = 0; i < MOST; i++)
        if (!areas[i].start)
            return areas + i;
    return NULL;
}

/* Memory of a device is taken as long as any process holds the lock of its file, which ends with the process. */
static size_t taken(int device) {
    const char *directory = setting("FAKE_CUDA", "");
    size_t sum = 0;
    char prefix[80], path[1024];
    snprintf(prefix, sizeof prefix, "memory-%s-", devices[device].part);
    DIR *list = opendir(directory);
    if (!list)
        return 0;
    for (struct dirent *entry; (entry = readdir(list));) {
        struct stat found;
        if (strncmp(entry->d_name, prefix, strlen(prefix)))
            continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (!flock(fd, LOCK_EX | LOCK_NB))
            unlink(path);
        else if (!fstat(fd, &found))
            sum += found.st_size;
        close(fd);
    }
    closedir(list);
    return sum;
}

/* A new file that stands for memory of the current device; below zero: an error of the driver. */
static int make(size_t size, char *path, size_t most) {
    static unsigned numbers;
    if (taken(current - 1) + size > devices[current - 1].bytes)
        return -OUT_OF_MEMORY;
    snprintf(path, most, "%s/memory-%.40s-%x.%x", setting("FAKE_CUDA", ""), devices[current - 1].part,
             (unsigned)getpid(), numbers++);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return fd < 0 || ftruncate(fd, size) || flock(fd, LOCK_SH) ? -UNKNOWN : fd;
}

static int map(struct area *area, const char *path, int fd, size_t size) {
    if (flock(fd, LOCK_SH))
        return UNKNOWN;
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (start == MAP_FAILED)
        return MAP_FAILED_;
    area->start = start;
    area->size = size;
    area->fd = fd;
    area->device = current - 1;
    snprintf(area->name, sizeof area->name, "%s", strrchr(path, '/') + 1);
    return OK;
}

static void unmap(struct area *area) {
    munmap(area->start, area->size);
    close(area->fd);
    memset(area, 0, sizeof *area);
}

int cuMemAlloc_v2(pointer *to, size_t size) {
    ENTER_CONTEXT("cuMemAlloc_v2");
    char path[1024];
    struct area *area = free_area();
    size = (size + PAGE - 1) / PAGE * PAGE;
    int fd = area ? make(size, path, sizeof path) : -OUT_OF_MEMORY;
    if (fd < 0)
        return -fd;
    area->access = 1;
    int result = map(area, path, fd, size);
    *to = (pointer)area->start | TAG;
    return result;
}

int cuMemFree_v2(pointer at) {
    ENTER_CONTEXT("cuMemFree_v2");
    struct area *area = area_of(at, 1);
    if (!area || area->opened || area->pages)
        return INVALID_VALUE;
    /* As the real one, it waits for the device. */
    pthread_mutex_lock(&lock);
    advance(1);
    pthread_mutex_unlock(&lock);
    unmap(area);
    return OK;
}

int cuMemGetInfo_v2(size_t *left, size_t *total) {
    ENTER_CONTEXT("cuMemGetInfo_v2");
    *total = devices[current - 1].bytes;
    *left = *total - taken(current - 1);
    return OK;
}

int cuMemGetAddressRange_v2(pointer *base, size_t *size, pointer at) {
    ENTER_CONTEXT("cuMemGetAddressRange_v2");
    struct area *area = area_of(at, 1);
    if (!area)
        return INVALID_VALUE;
    *base = (pointer)area->start | TAG;
    *size = area->size;
    return OK;
}

int cuPointerGetAttribute(void *to, int attribute, pointer at) {
    ENTER_CONTEXT("cuPointerGetAttribute");
    struct area *area = area_of(at, 1);
    if (!area)
        return INVALID_VALUE;
    if (attribute == 9)
        *(int *)to = area->device;
    else if (attribute == 10)
        *(char *)to = !area->pages;
    else
        return NOT_SUPPORTED;
    return OK;
}

int cuIpcGetMemHandle(handle *to, pointer at) {
    ENTER_CONTEXT("cuIpcGetMemHandle");
    struct area *area = area_of(at, 1);
    if (!area || area->pages || area->opened)
        return INVALID_VALUE;
    memset(to, 0, sizeof *to);
    snprintf(to->bytes, sizeof to->bytes, "%s", area->name);
    return OK;
}

int cuIpcOpenMemHandle_v2(pointer *to, handle from, unsigned flags) {
    ENTER_CONTEXT("cuIpcOpenMemHandle_v2");
    char path[1024], prefix[80];
    struct stat found;
    if (flags != 1)
        return INVALID_VALUE;
    from.bytes[63] = 0;
    for (int i = 0; i < MOST; i++)
        if (areas[i].start && !strcmp(areas[i].name, from.bytes)) {
            if (!areas[i].opened)
                return INVALID_CONTEXT;
            areas[i].opened++;
            *to = (pointer)areas[i].start | TAG;
            return OK;
        }
    snprintf(prefix, sizeof prefix, "memory-%.40s-", devices[current - 1].part);
    struct area *area = free_area();
    snprintf(path, sizeof path, "%s/%s", setting("FAKE_CUDA", ""), from.bytes);
    int fd = strncmp(from.bytes, prefix, strlen(prefix)) || strchr(from.bytes, '/') ? -1
                                                                                    : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return INVALID_HANDLE;
    if (!area || fstat(fd, &found) || map(area, path, fd, found.st_size)) {
        close(fd);
        return MAP_FAILED_;
    }
    area->opened = area->access = 1;
    *to = (pointer)area->start | TAG;
    return OK;
}

static int in_use(const struct area *area) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct operation *one = stream->first; one; one = one->next)
            if (!one->event && ((one->to >= area->start && one->to < area->start + area->size) ||
                                (one->from >= area->start && one->from < area->start + area->size)))
                return 1;
    return 0;
}

int cuIpcCloseMemHandle(pointer at) {
    ENTER_CONTEXT("cuIpcCloseMemHandle");
    struct area *area = area_of(at, 1);
    if (!area || !area->opened || (pointer)area->start != (at & ~TAG))
        return INVALID_VALUE;
    if (in_use(area))
        abort();
    if (!--area->opened)
        unmap(area);
    return OK;
}

/* -- memory page by page ----------------------------------------------------------------------------------------- */

struct place {
    int type, id;
};
struct properties {
    int type, types;
    struct place place;
    void *metadata;
    unsigned char flags[8];
};
struct right {
    struct place place;
    int flags;
};

static void let_go(struct physical *pages) {
    if (!pages->handles && !pages->mappings) {
        close(pages->fd);
        free(pages);
    }
}

static struct physical *physical(int fd, size_t size, int device, int types) {
    struct physical *pages = calloc(1, sizeof *pages);
    *pages = (struct physical){fd, device, types, 1, 0, size};
    return pages;
}

int cuMemCreate(struct physical **to, size_t size, const struct properties *what, uint64_t flags) {
    ENTER_CONTEXT("cuMemCreate");
    char path[1024];
    if (!size || size % PAGE || flags || what->type != 1 || what->place.type != 1)
        return INVALID_VALUE;
    int fd = make(size, path, sizeof path);
    if (fd < 0)
        return -fd;
    *to = physical(fd, size, what->place.id, what->types);
    return OK;
}

int cuMemRelease(struct physical *pages) {
    ENTER("cuMemRelease");
    if (!pages || !pages->handles)
        return INVALID_VALUE;
    pages->handles--;
    let_go(pages);
    return OK;
}

int cuMemRetainAllocationHandle(struct physical **to, void *at) {
    ENTER("cuMemRetainAllocationHandle");
    struct area *area = area_of((pointer)at, 1);
    if (!area || !area->pages)
        return INVALID_VALUE;
    area->pages->handles++;
    *to = area->pages;
    return OK;
}

int cuMemGetAllocationPropertiesFromHandle(struct properties *to, struct physical *pages) {
    ENTER("cuMemGetAllocationPropertiesFromHandle");
    memset(to, 0, sizeof *to);
    *to = (struct properties){.type = 1, .types = pages->types, .place = {1, pages->device}};
    return OK;
}

int cuMemExportToShareableHandle(void *to, struct physical *pages, int type, uint64_t flags) {
    ENTER("cuMemExportToShareableHandle");
    if (flags || type != 1 || !(pages->types & 1))
        return INVALID_VALUE;
    int fd = fcntl(pages->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return UNKNOWN;
    *(int *)to = fd;
    return OK;
}

int cuMemImportFromShareableHandle(struct physical **to, void *from, int type) {
    ENTER_CONTEXT("cuMemImportFromShareableHandle");
    char link[64], path[1024] = "", prefix[1024];
    struct stat found;
    snprintf(link, sizeof link, "/proc/self/fd/%d", (int)(intptr_t)from);
    snprintf(prefix, sizeof prefix, "%s/memory-%.40s-", setting("FAKE_CUDA", ""), devices[current - 1].part);
    if (type != 1 || readlink(link, path, sizeof path - 1) < 0 || strncmp(path, prefix, strlen(prefix)) ||
        fstat((int)(intptr_t)from, &found))
        return INVALID_VALUE;
    int fd = fcntl((int)(intptr_t)from, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return UNKNOWN;
    *to = physical(fd, found.st_size, current - 1, 1);
    return OK;
}

int cuMemAddressReserve(pointer *to, size_t size, size_t alignment, pointer wish, uint64_t flags) {
    ENTER_CONTEXT("cuMemAddressReserve");
    if (!size || size % PAGE || alignment || wish || flags)
        return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (!reserved[i].start) {
            char *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (start == MAP_FAILED)
                return OUT_OF_MEMORY;
            reserved[i].start = start;
            reserved[i].size = size;
            *to = (pointer)start | TAG;
            return OK;
        }
    return OUT_OF_MEMORY;
}

int cuMemAddressFree(pointer at, size_t size) {
    ENTER_CONTEXT("cuMemAddressFree");
    char *start = (char *)(at & ~TAG);
    for (int i = 0; i < MOST; i++)
        if (areas[i].start && areas[i].start < start + size && areas[i].start + areas[i].size > start)
            return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (reserved[i].start && reserved[i].start == start && reserved[i].size == size) {
            munmap(start, size);
            reserved[i].start = NULL;
            return OK;
        }
    return INVALID_VALUE;
}

int cuMemMap(pointer at, size_t size, size_t offset, struct physical *pages, uint64_t flags) {
    ENTER_CONTEXT("cuMemMap");
    char *start = (char *)(at & ~TAG);
    struct area *area = free_area();
    int inside = 0;
    for (int i = 0; i < MOST; i++) {
        inside |= reserved[i].start && start >= reserved[i].start && start + size <= reserved[i].start + reserved[i].size;
        if (areas[i].start && areas[i].start < start + size && areas[i].start + areas[i].size > start)
            return INVALID_VALUE;
    }
    if (!inside || offset || flags || size != pages->size || !pages->handles)
        return INVALID_VALUE;
    if (!area || mmap(start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages->fd, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    *area = (struct area){.start = start, .size = size, .device = current - 1, .fd = -1, .pages = pages};
    pages->mappings++;
    return OK;
}

/* The mappings that begin in a range, one after the other; NULL behind the last, the range must not cut one. */
static struct area *next_mapping(char *start, char *end, int *which) {
    for (; *which < MOST; ++*which) {
        struct area *area = areas + *which;
        if (area->start && area->pages && area->start >= start && area->start + area->size <= end) {
            ++*which;
            return area;
        }
    }
    return NULL;
}

int cuMemSetAccess(pointer at, size_t size, const struct right *rights, size_t count) {
    ENTER_CONTEXT("cuMemSetAccess");
    char *start = (char *)(at & ~TAG);
    size_t sum = 0;
    int which = 0;
    if (count != 1 || rights->place.type != 1 || rights->flags != 3)
        return INVALID_VALUE;
    if (rights->place.id != current - 1)
        return INVALID_DEVICE;
    for (struct area *area; (area = next_mapping(start, start + size, &which));)
        sum += area->size;
    if (sum != size)
        return INVALID_VALUE;
    which = 0;
    for (struct area *area; (area = next_mapping(start, start + size, &which));)
        area->access = 1;
    return OK;
}

int cuMemUnmap(pointer at, size_t size) {
    ENTER_CONTEXT("cuMemUnmap");
    char *start = (char *)(at & ~TAG);
    size_t sum = 0;
    int which = 0;
    for (struct area *area; (area = next_mapping(start, start + size, &which));)
        sum += area->size;
    if (sum != size)
        return INVALID_VALUE;
    which = 0;
    for (struct area *area; (area = next_mapping(start, start + size, &which));) {
        if (in_use(area))
            abort();
        mmap(area->start, area->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        area->pages->mappings--;
        let_go(area->pages);
        memset(area, 0, sizeof *area);
    }
    return OK;
}

int cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    ENTER_CONTEXT("cuMemHostRegister_v2");
    struct area *found = NULL;
    if (flags != 1 || (uintptr_t)start % 4096 || !size)
        return INVALID_VALUE;
    for (int i = 0; i < MOST; i++) {
        if (pinned[i].start && (char *)start < pinned[i].start + pinned[i].size &&
            (char *)start + size > pinned[i].start)
            return ALREADY_REGISTERED;
        if (!pinned[i].start)
            found = pinned + i;
    }
    if (!found)
        return OUT_OF_MEMORY;
    found->start = start;
    found->size = size;
    return OK;
}

/* The bytes behind an address that one copy may touch, or NULL: within one allocation, or pages mapped one after the
 * other, or one page-locked range. */
static char *bytes_at(pointer at, size_t size) {
    if (at & TAG) {
        char *start = (char *)(at & ~TAG), *end = start + size, *next = start;
        while (next < end) {
            struct area *area = area_of((pointer)next | TAG, 1);
            if (!area || !area->access || (!area->pages && end > area->start + area->size))
                return NULL;
            next = area->start + area->size;
        }
        return start;
    }
    for (int i = 0; i < MOST; i++)
        if (pinned[i].start && (char *)at >= pinned[i].start && (char *)at + size <= pinned[i].start + pinned[i].size)
            return (char *)at;
    return NULL;
}

/* -- streams ----------------------------------------------------------------------------------------------------- */

int cuStreamCreate(struct stream **stream, unsigned flags) {
    ENTER_CONTEXT("cuStreamCreate");
    (void)flags;
    *stream = calloc(1, sizeof **stream);
    pthread_mutex_lock(&lock);
    (*stream)->next = streams;
    streams = *stream;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuEventCreate(struct event **event, unsigned flags) {
    ENTER_CONTEXT("cuEventCreate");
    (void)flags;
    *event = calloc(1, sizeof **event);
    return OK;
}

static void append(struct stream *stream, char *to, const char *from, size_t size, int fill, struct event *event) {
    struct operation *one = calloc(1, sizeof *one);
    *one = (struct operation){NULL, to, from, size, fill, event, now() + strtoull(setting("FAKE_CUDA_DELAY_US", "0"), NULL, 10)};
    pthread_mutex_lock(&lock);
    if (stream->last)
        stream->last->next = one;
    else
        stream->first = one;
    stream->last = one;
    pthread_mutex_unlock(&lock);
}

static void advance(int all) {
    uint64_t time = now();
    for (struct stream *stream = streams; stream; stream = stream->next)
        while (stream->first && (all || stream->first->due <= time)) {
            struct operation *one = stream->first;
            if (one->event)
                one->event->passed++;
            else if (one->fill >= 0)
                memset(one->to, one->fill, one->size);
            else
                memcpy(one->to, one->from, one->size);
            stream->first = one->next;
            if (!stream->first)
                stream->last = NULL;
            free(one);
        }
}

int cuEventRecord(struct event *event, struct stream *stream) {
    ENTER_CONTEXT("cuEventRecord");
    event->recorded++;
    append(stream, NULL, NULL, 0, -1, event);
    return OK;
}

int cuEventQuery(struct event *event) {
    ENTER_CONTEXT("cuEventQuery");
    pthread_mutex_lock(&lock);
    advance(0);
    int ready = event->passed == event->recorded;
    pthread_mutex_unlock(&lock);
    return ready ? OK : NOT_READY;
}

static int copy(pointer to, pointer from, size_t size, struct stream *stream) {
    char *target = bytes_at(to, size), *source = bytes_at(from, size);
    if (!target || !source || !size || !stream)
        return INVALID_VALUE;
    append(stream, target, source, size, -1, NULL);
    return OK;
}

int cuMemcpyAsync(pointer to, pointer from, size_t size, struct stream *stream) {
    ENTER_CONTEXT("cuMemcpyAsync");
    return copy(to, from, size, stream);
}

struct rectangle {
    size_t from_x, from_y;
    unsigned from_type;
    const void *from_host;
    pointer from;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_type;
    void *to_host;
    pointer to;
    void *to_array;
    size_t to_pitch, width, height;
};

int cuMemcpy2DAsync_v2(const struct rectangle *what, struct stream *stream) {
    ENTER_CONTEXT("cuMemcpy2DAsync_v2");
    size_t last = what->height - 1;
    if (what->from_type != 4 || what->to_type != 4 || what->from_pitch < what->width || what->to_pitch < what->width ||
        !bytes_at(what->from, last * what->from_pitch + what->width) ||
        !bytes_at(what->to, last * what->to_pitch + what->width))
        return INVALID_VALUE;
    for (size_t row = 0; row < what->height; row++)
        copy(what->to + row * what->to_pitch, what->from + row * what->from_pitch, what->width, stream);
    return OK;
}

struct attributes {
    int order, from[2], to[2];
    unsigned flags;
};

static int batch(pointer *to, pointer *from, size_t *sizes, size_t count, struct attributes *attributes, size_t *first,
                 size_t kinds, size_t *failed, struct stream *stream) {
    ENTER_CONTEXT("cuMemcpyBatchAsync");
    *failed = SIZE_MAX;
    if (!count || kinds != 1 || first[0] || attributes->order != 1 || attributes->flags > 1 || !stream)
        return INVALID_VALUE;
    for (size_t i = count; i-- > 0;) {
        int result = copy(to[i], from[i], sizes[i], stream);
        if (result) {
            *failed = i;
            return result;
        }
    }
    return OK;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    ENTER("cuGetProcAddress_v2");
    (void)flags;
    (void)status;
    if (strcmp(name, "cuMemcpyBatchAsync") || version > atoi(setting("FAKE_CUDA_VERSION", "12080"))) {
        *found = NULL;
        return NOT_FOUND;
    }
    *found = (void *)batch;
    return OK;
}

/* -- what tests do as the engine: these do not return before it is done ---------------------------------------------- */

int cuMemcpyHtoD_v2(pointer to, const void *from, size_t size) {
    ENTER_CONTEXT("cuMemcpyHtoD_v2");
    char *target = bytes_at(to, size);
    if (!target)
        return INVALID_VALUE;
    memcpy(target, from, size);
    return OK;
}

int cuMemcpyDtoH_v2(void *to, pointer from, size_t size) {
    ENTER_CONTEXT("cuMemcpyDtoH_v2");
    char *source = bytes_at(from, size);
    if (!source)
        return INVALID_VALUE;
    memcpy(to, source, size);
    return OK;
}

int cuMemsetD8Async(pointer to, unsigned char value, size_t size, struct stream *stream) {
    ENTER_CONTEXT("cuMemsetD8Async");
    char *target = bytes_at(to, size);
    if (!target)
        return INVALID_VALUE;
    append(stream, target, NULL, size, value, NULL);
    return OK;
}
