/* Words of the mailbox, for the crew and its tests. Not installed. */
#ifndef GLM53_MAILBOX_H
#define GLM53_MAILBOX_H

#include "internal.h"

enum { GLM53_MAIL_MAGIC = 0x4d333547, GLM53_MAIL_VERSION = 2 };

/* The shape that the header of an initialised mailbox states. False if it is none. */
bool glm53_mailbox_shape_of(const void *memory, glm53_mailbox_shape *shape);

static inline uint32_t *glm53_mail_word(uint8_t *cell, size_t offset) {
    return (uint32_t *)(void *)(cell + offset);
}

/* The words `posted` and `done` are also read and written from outside the process's threads, so they are
 * plain words with atomic accesses, not _Atomic objects. */
static inline uint32_t glm53_mail_load(uint8_t *cell, size_t offset) {
    return __atomic_load_n(glm53_mail_word(cell, offset), __ATOMIC_ACQUIRE);
}

static inline void glm53_mail_store(uint8_t *cell, size_t offset, uint32_t value) {
    __atomic_store_n(glm53_mail_word(cell, offset), value, __ATOMIC_SEQ_CST);
}

#endif
