// Messages through shared memory, as plain functions of the module _C: a call of an op costs more than a small message.
#include <Python.h>

#include "../transport/shared_memory.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

extern PyMethodDef shared_memory_methods[];

namespace {

constexpr const char *END_NAME = "ringtile.shm", *MESSAGE_NAME = "ringtile.shm_message";

// One rank's end, and the segments that it maps. A forked process leaves all of it alone.
struct End {
    std::unique_ptr<rt_shm, decltype(&free)> shm{nullptr, free};
    std::vector<void *> segments;
    pid_t process = getpid();

    ~End() {
        if (process != getpid()) {
            (void)shm.release();
            return;
        }
        if (shm) rt_shm_close(shm.get());
        for (void *segment : segments)
            if (segment != nullptr) rt_shm_unmap(segment, static_cast<int64_t>(segments.size()));
    }
};

// A message keeps its end and its tensor alive.
struct Message {
    rt_shm_message message = {};
    rt_shm *shm = nullptr;
    PyObject *end = nullptr, *tensor = nullptr;

    ~Message() {
        // Looks at the state under the lock: the progress thread may be writing it.
        if (shm != nullptr) rt_shm_drop(shm, &message);
        Py_XDECREF(tensor);
        Py_XDECREF(end);
    }
};

template <class T> T *unwrap(PyObject *capsule, const char *name) {
    return static_cast<T *>(PyCapsule_GetPointer(capsule, name));
}

// Takes over the object; nullptr, with Python's error, if there is no memory for its handle.
template <class T> PyObject *wrap(std::unique_ptr<T> object, const char *name) {
    PyObject *capsule =
        PyCapsule_New(object.get(), name, [](PyObject *self) { delete unwrap<T>(self, PyCapsule_GetName(self)); });
    if (capsule != nullptr) (void)object.release();
    return capsule;
}

// Runs an action without the GIL.
template <class Action> auto without_gil(Action action) {
    PyThreadState *caller = PyEval_SaveThread();
    const auto result = action();
    PyEval_RestoreThread(caller);
    return result;
}

PyObject *segment_bytes(PyObject *, PyObject *args) {
    long long num_ranks = 0;
    if (!PyArg_ParseTuple(args, "L:shm_segment_bytes", &num_ranks)) return nullptr;
    return PyLong_FromLongLong(rt_shm_segment_bytes(num_ranks));
}

bool to_ints(PyObject *tuple, std::vector<int> &numbers) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i)
        numbers.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GetItem(tuple, i))));
    return PyErr_Occurred() == nullptr;
}

PyObject *open_end(PyObject *, PyObject *args) {
    long long rank = 0;
    PyObject *file_tuple = nullptr, *socket_tuple = nullptr;
    std::vector<int> files, sockets;
    if (!PyArg_ParseTuple(args, "LO!O!:shm_open", &rank, &PyTuple_Type, &file_tuple, &PyTuple_Type, &socket_tuple) ||
        !to_ints(file_tuple, files) || !to_ints(socket_tuple, sockets))
        return nullptr;
    const auto num_ranks = static_cast<int64_t>(files.size());
    if (sockets.size() != files.size()) {
        PyErr_SetString(PyExc_ValueError, "shm_open: expected as many sockets as files");
        return nullptr;
    }
    auto end = std::make_unique<End>();
    end->segments.resize(files.size());
    for (size_t i = 0; i < files.size(); ++i) {
        if (files[i] < 0) continue;
        end->segments[i] = rt_shm_map(files[i], num_ranks);
        if (end->segments[i] == nullptr) return PyErr_SetFromErrno(PyExc_OSError);
    }
    std::unique_ptr<rt_shm, decltype(&free)> shm(
        static_cast<rt_shm *>(malloc(static_cast<size_t>(rt_shm_bytes(num_ranks)))), free);
    if (!shm) return PyErr_NoMemory();
    const rt_status status = rt_shm_open(shm.get(), rank, num_ranks, end->segments.data(), sockets.data());
    if (status != RT_OK) return PyErr_Format(PyExc_OSError, "shm_open: %s", rt_status_message(status));
    end->shm = std::move(shm);
    return wrap(std::move(end), END_NAME);
}

PyObject *post(PyObject *, PyObject *args) {
    PyObject *capsule = nullptr, *tensor = nullptr;
    long long peer = 0, num_bytes = 0;
    unsigned long long tag = 0, address = 0;
    int outgoing = 0;
    if (!PyArg_ParseTuple(args, "OLpKKLO:shm_post", &capsule, &peer, &outgoing, &tag, &address, &num_bytes, &tensor))
        return nullptr;
    End *end = unwrap<End>(capsule, END_NAME);
    if (end == nullptr) return nullptr;
    auto message = std::make_unique<Message>();
    message->message = {reinterpret_cast<void *>(address), num_bytes, tag, peer, outgoing != 0, RT_SHM_LOST, {}};
    message->shm = end->shm.get(), message->end = capsule, message->tensor = tensor;
    Py_INCREF(capsule), Py_INCREF(tensor);
    without_gil([&] {
        rt_shm_post(message->shm, &message->message);
        return 0;
    });
    return wrap(std::move(message), MESSAGE_NAME);
}

PyObject *wait(PyObject *, PyObject *args) {
    PyObject *capsule = nullptr;
    double seconds = 0;
    if (!PyArg_ParseTuple(args, "Od:shm_wait", &capsule, &seconds)) return nullptr;
    Message *message = unwrap<Message>(capsule, MESSAGE_NAME);
    if (message == nullptr) return nullptr;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
        const std::chrono::duration<double, std::milli> left = end - std::chrono::steady_clock::now();
        const double at_most = std::clamp(left.count(), 0.0, 1000.0); // then looks for Ctrl-C
        const rt_shm_state state = without_gil(
            [&] { return rt_shm_wait(message->shm, &message->message, static_cast<int64_t>(at_most) + 1); });
        if (state == RT_SHM_DONE) Py_RETURN_NONE;
        if (state == RT_SHM_PENDING && PyErr_CheckSignals() != 0) return nullptr;
        if (state == RT_SHM_PENDING && left.count() > 0) continue;
        char reason[64] = "it has closed the connection";
        if (state == RT_SHM_PENDING) (void)snprintf(reason, sizeof(reason), "nothing came for %g s", seconds);
        PyErr_SetString(PyExc_RuntimeError, reason);
        return nullptr;
    }
}

PyObject *drop(PyObject *, PyObject *args) {
    PyObject *capsule = nullptr;
    if (!PyArg_ParseTuple(args, "O:shm_drop", &capsule)) return nullptr;
    End *end = unwrap<End>(capsule, END_NAME);
    if (end == nullptr) return nullptr;
    rt_shm_drop(end->shm.get(), nullptr);
    Py_RETURN_NONE;
}

PyObject *close_end(PyObject *, PyObject *args) {
    PyObject *capsule = nullptr;
    if (!PyArg_ParseTuple(args, "O:shm_close", &capsule)) return nullptr;
    End *end = unwrap<End>(capsule, END_NAME);
    if (end == nullptr) return nullptr;
    rt_shm_close(end->shm.get());
    Py_RETURN_NONE;
}

} // namespace

PyMethodDef shared_memory_methods[] = {
    {"shm_segment_bytes", segment_bytes, METH_VARARGS, "shm_segment_bytes(num_ranks) -> size of a rank's segment"},
    {"shm_open", open_end, METH_VARARGS,
     "shm_open(rank, files, sockets) -> end; tuples by rank, -1 for ranks that share no memory. OSError"},
    {"shm_post", post, METH_VARARGS,
     "shm_post(end, peer, outgoing, tag, address, num_bytes, tensor) -> message, which keeps the tensor"},
    {"shm_wait", wait, METH_VARARGS,
     "shm_wait(message, seconds); RuntimeError: the peer or the message is lost, or nothing came for so long"},
    {"shm_drop", drop, METH_VARARGS, "shm_drop(end): drops all pending messages"},
    {"shm_close", close_end, METH_VARARGS, "shm_close(end): drops all messages, for good"},
    {nullptr, nullptr, 0, nullptr}};
