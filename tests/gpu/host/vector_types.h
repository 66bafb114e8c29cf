/* Host CUDA: dim3 and the short vectors, with the alignments that the device requires. */
#ifndef HOST_CUDA_VECTOR_TYPES_H
#define HOST_CUDA_VECTOR_TYPES_H

#define HOST_CUDA_VECTORS(name, element, align2, align4)                             \
    struct name##1                                                                   \
    {                                                                                \
        element x;                                                                   \
    };                                                                               \
    struct alignas(align2) name##2                                                   \
    {                                                                                \
        element x, y;                                                                \
    };                                                                               \
    struct name##3                                                                   \
    {                                                                                \
        element x, y, z;                                                             \
    };                                                                               \
    struct alignas(align4) name##4                                                   \
    {                                                                                \
        element x, y, z, w;                                                          \
    };                                                                               \
    static inline name##1 make_##name##1(element x)                                  \
    {                                                                                \
        return {x};                                                                  \
    }                                                                                \
    static inline name##2 make_##name##2(element x, element y)                       \
    {                                                                                \
        return {x, y};                                                               \
    }                                                                                \
    static inline name##3 make_##name##3(element x, element y, element z)            \
    {                                                                                \
        return {x, y, z};                                                            \
    }                                                                                \
    static inline name##4 make_##name##4(element x, element y, element z, element w) \
    {                                                                                \
        return {x, y, z, w};                                                         \
    }

HOST_CUDA_VECTORS(char, signed char, 2, 4)
HOST_CUDA_VECTORS(uchar, unsigned char, 2, 4)
HOST_CUDA_VECTORS(short, short, 4, 8)
HOST_CUDA_VECTORS(ushort, unsigned short, 4, 8)
HOST_CUDA_VECTORS(int, int, 8, 16)
HOST_CUDA_VECTORS(uint, unsigned int, 8, 16)
HOST_CUDA_VECTORS(longlong, long long, 16, 16)
HOST_CUDA_VECTORS(ulonglong, unsigned long long, 16, 16)
HOST_CUDA_VECTORS(float, float, 8, 16)
HOST_CUDA_VECTORS(double, double, 16, 16)
#undef HOST_CUDA_VECTORS

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    operator uint3() const
    {
        return {x, y, z};
    }
};

#endif
