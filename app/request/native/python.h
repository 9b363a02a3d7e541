// Bytes of Python's objects and functions for it to call, by the little of its stable interface that is needed, so that its headers
// are not.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <string_view>

extern "C" {
struct Object;
struct View {
    const void* data;
    Object* object;
    ssize_t size, item;
    int readonly, dimensions;
    char* format;
    ssize_t *shape, *strides, *suboffsets;
    void* internal;
};
using Function = Object*(Object* self, Object* const* arguments, ssize_t count);
struct Method {
    const char* name;
    Function* function;
    int flags;
    const char* text;
};
int PyObject_GetBuffer(Object*, View*, int);
void PyBuffer_Release(View*);
void PyErr_Clear();
Object* PyBytes_FromStringAndSize(const char*, ssize_t);
Object* PyCapsule_New(void*, const char* name, void (*destroy)(Object*));
void* PyCapsule_GetPointer(Object*, const char* name);
Object* PyCFunction_NewEx(Method*, Object* self, Object* module);
Object* PyErr_NoMemory();
long long PyLong_AsLongLong(Object*);
Object* Py_BuildValue(const char* format, ...);
void Py_DecRef(Object*);
}


namespace codec {

using Int = int64_t;

constexpr int FASTCALL = 0x80;  // arguments come as an array, without a tuple

// Thrown where Python should do the work.
struct Declined {};

// The bytes of a Python object, of which there must be so many where that is said.
class Bytes {
public:
    explicit Bytes(Object* from, Int wanted = -1) {
        if (PyObject_GetBuffer(from, &view, 0)) {  // 0: any, if it is contiguous
            PyErr_Clear();
            throw Declined();
        }
        if (wanted >= 0 && wanted != view.size) {
            PyBuffer_Release(&view);
            throw Declined();
        }
    }

    ~Bytes() { PyBuffer_Release(&view); }
    Bytes(const Bytes&) = delete;

    Int size() const { return view.size; }
    string_view text() const { return {as<char>(), static_cast<size_t>(view.size)}; }

    template <class T>
    const T* as() const {
        return static_cast<const T*>(view.data);
    }

private:
    View view{};
};


}  // namespace codec
