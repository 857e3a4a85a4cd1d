// ringtile._bench: the multiply-add peak on torch's threads, for `ringtile bench` alone. A plain Python function rather
// than an op: it has no tensors and belongs in no model.
#include <Python.h> // first, as its documentation asks

#include "../bench/multiply_add.h"
#include "binding.h"

// multiply_add(isa, iterations) -> flops. isa: the index in ops.ISA_NAMES that ops.cpu_isa chose.
static PyObject *multiply_add(PyObject *, PyObject *args) {
    int isa = 0;
    long long iterations = 0;
    if (!PyArg_ParseTuple(args, "iL:multiply_add", &isa, &iterations)) return nullptr;
    double flops = 0;
    PyThreadState *caller = PyEval_SaveThread(); // releases the GIL
    const rt_status status = rt_multiply_add(static_cast<rt_isa>(isa), iterations, &flops, ringtile::torch_threads());
    PyEval_RestoreThread(caller);
    if (status == RT_OK) return PyFloat_FromDouble(flops);
    PyErr_Format(PyExc_ValueError, "multiply_add: %s", rt_status_message(status));
    return nullptr;
}

static PyMethodDef methods[] = {
    {"multiply_add", multiply_add, METH_VARARGS, "multiply_add(isa, iterations) -> flops done by all threads"},
    {nullptr, nullptr, 0, nullptr}};
static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_bench", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__bench(void) { return PyModule_Create(&module_def); }
