/* Layout and initial state of a mailbox; the bytes are described in the public header. */
#include "mailbox.h"

static int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

static bool is_possible(const glm53_mailbox_shape *shape) {
    int32_t cells = shape->num_cells;
    return cells >= 2 && cells <= 4096 && (cells & (cells - 1)) == 0 && shape->max_rows >= 1 &&
           shape->max_rows <= 8 && shape->max_picks >= 1 && shape->max_picks <= 64 &&
           shape->hidden >= GLM53_BLOCK && shape->hidden % GLM53_BLOCK == 0 && shape->hidden <= 1 << 20;
}

int32_t glm53_mailbox_measure(const glm53_mailbox_shape *shape, glm53_mailbox_layout *layout) {
    if (!shape || !layout || !is_possible(shape)) return GLM53_BAD_ARGUMENT;
    int64_t picks = (int64_t)shape->max_rows * shape->max_picks;
    int64_t rows = (int64_t)shape->max_rows * shape->hidden;
    layout->weights_offset = round_up(GLM53_MAIL_PICKS + 4 * picks, 64);
    layout->x_offset = round_up(layout->weights_offset + 4 * picks, 256);
    layout->y_offset = round_up(layout->x_offset + 4 * rows, 256);
    layout->cell_bytes = round_up(layout->y_offset + 4 * rows, 256);
    layout->total_bytes = GLM53_MAIL_HEADER_BYTES + shape->num_cells * layout->cell_bytes;
    return GLM53_OK;
}

int32_t glm53_mailbox_init(void *memory, const glm53_mailbox_shape *shape) {
    glm53_mailbox_layout layout;
    if (!memory || (uintptr_t)memory % 256) return GLM53_BAD_ARGUMENT;
    int32_t status = glm53_mailbox_measure(shape, &layout);
    if (status != GLM53_OK) return status;
    memset(memory, 0, (size_t)layout.total_bytes);
    uint32_t header[] = {
        GLM53_MAIL_MAGIC,          GLM53_MAIL_VERSION,          (uint32_t)shape->num_cells,
        (uint32_t)shape->max_rows, (uint32_t)shape->max_picks,  (uint32_t)shape->hidden,
        shape->first_seq,          (uint32_t)layout.cell_bytes,
    };
    memcpy(memory, header, sizeof header);
    /* As if the lap before the first had been posted and answered. */
    uint32_t cells = (uint32_t)shape->num_cells;
    for (uint32_t i = 0; i < cells; i++) {
        uint32_t seq = shape->first_seq + i;
        uint8_t *cell =
            (uint8_t *)memory + GLM53_MAIL_HEADER_BYTES + (size_t)(seq % cells) * (size_t)layout.cell_bytes;
        glm53_mail_store(cell, GLM53_MAIL_POSTED, seq - cells);
        glm53_mail_store(cell, GLM53_MAIL_DONE, seq - cells);
    }
    return GLM53_OK;
}

bool glm53_mailbox_shape_of(const void *memory, glm53_mailbox_shape *shape) {
    uint32_t header[8];
    if (!memory || (uintptr_t)memory % 256) return false;
    memcpy(header, memory, sizeof header);
    if (header[0] != GLM53_MAIL_MAGIC || header[1] != GLM53_MAIL_VERSION) return false;
    *shape = (glm53_mailbox_shape){
        .num_cells = (int32_t)header[2],
        .max_rows = (int32_t)header[3],
        .max_picks = (int32_t)header[4],
        .hidden = (int32_t)header[5],
        .first_seq = header[6],
    };
    glm53_mailbox_layout layout;
    return glm53_mailbox_measure(shape, &layout) == GLM53_OK && layout.cell_bytes == header[7];
}
