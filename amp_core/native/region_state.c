/* The autocast state of a thread, read and written through torch's own functions without their Python
 * bindings, which parse the device's name at every call: a region makes up to nine of them.
 *
 * What each function does is said, once, in amp_core/region_state.py, whose functions these stand in for.
 * torch's functions take and return plain numbers and are looked up by their mangled names, so that this
 * is built without torch and is tied to no version of it. A name that is missing ends in an ImportError.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>

/* c10::DeviceType and c10::ScalarType are enumerations over int8_t. */
static bool (*is_enabled)(int8_t device);
static void (*set_enabled)(int8_t device, bool enabled);
static int8_t (*get_dtype)(int8_t device);
static void (*set_dtype)(int8_t device, int8_t dtype);
static bool (*is_cached)(void);
static void (*set_cached)(bool cached);
static int (*enter_nesting)(void);
static int (*leave_nesting)(void);
static void (*clear_cache)(void);
static bool (*modes_are_on)(void);

static const struct {
    const char *name;
    void **target;
} symbols[] = {
    {"_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE", (void **)&is_enabled},
    {"_ZN2at8autocast20set_autocast_enabledEN3c1010DeviceTypeEb", (void **)&set_enabled},
    {"_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE", (void **)&get_dtype},
    {"_ZN2at8autocast18set_autocast_dtypeEN3c1010DeviceTypeENS1_10ScalarTypeE", (void **)&set_dtype},
    {"_ZN2at8autocast25is_autocast_cache_enabledEv", (void **)&is_cached},
    {"_ZN2at8autocast26set_autocast_cache_enabledEb", (void **)&set_cached},
    {"_ZN2at8autocast17increment_nestingEv", (void **)&enter_nesting},
    {"_ZN2at8autocast17decrement_nestingEv", (void **)&leave_nesting},
    {"_ZN2at8autocast11clear_cacheEv", (void **)&clear_cache},
    {"_ZN2at4impl27torch_function_mode_enabledEv", (void **)&modes_are_on},
};

/* The forms in Python, for the devices that have no number here. */
static PyObject *enter_in_python, *leave_in_python, *take_out;

/* A state in one number, small enough that Python keeps the objects: enabled, cached, dtype, device. */
#define ENABLED(state) (((state) & 1) != 0)
#define CACHED(state) (((state) & 2) != 0)
#define DTYPE(state) ((int8_t)(((state) >> 2) & 63))
#define DEVICE(state) ((int8_t)((state) >> 8))

static long state_of(int8_t device)
{
    return (long)is_enabled(device) | (long)is_cached() << 1 | (long)get_dtype(device) << 2;
}

/* The casts that are freed may need the interpreter in another thread, which may wait for torch's lock. */
static void drop_casts(void)
{
    Py_BEGIN_ALLOW_THREADS
    clear_cache();
    Py_END_ALLOW_THREADS
}

static void change(int8_t device, long from, long to)
{
    if (ENABLED(from) != ENABLED(to))
        set_enabled(device, ENABLED(to));
    if (DTYPE(from) != DTYPE(to)) {
        set_dtype(device, DTYPE(to));
        drop_casts();
    }
    if (CACHED(from) != CACHED(to))
        set_cached(CACHED(to));
}

static PyObject *enter_region(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "enter() takes 3 arguments, got %zd", count);
    if (!PyLong_CheckExact(args[2]))
        return PyObject_CallFunctionObjArgs(enter_in_python, args[0], args[1], args[2], NULL);
    long to = PyLong_AsLong(args[2]), from = state_of(DEVICE(to));
    PyObject *frame = PyTuple_New(4);
    PyObject *before = PyLong_FromLong(from), *nesting = PyLong_FromLong(enter_nesting());
    if (frame == NULL || before == NULL || nesting == NULL)
        goto failed;
    PyTuple_SetItem(frame, 0, Py_NewRef(args[1]));
    PyTuple_SetItem(frame, 1, before);
    PyTuple_SetItem(frame, 2, nesting);
    PyTuple_SetItem(frame, 3, Py_NewRef(Py_False));
    before = nesting = NULL;
    if (PyList_Append(args[0], frame) < 0)
        goto failed;
    Py_DECREF(frame);
    change(DEVICE(to), from, to & 255);
    return PyBool_FromLong(modes_are_on());
failed:
    leave_nesting();
    Py_XDECREF(frame);
    Py_XDECREF(before);
    Py_XDECREF(nesting);
    return NULL;
}

/* The frame of `region`, taken off `frames`: a new reference. */
static PyObject *pop_frame(PyObject *frames, PyObject *region)
{
    Py_ssize_t last = PyList_Size(frames) - 1;
    PyObject *frame = last < 0 ? NULL : PyList_GetItem(frames, last);
    if (frame == NULL || PyTuple_GetItem(frame, 0) != region)
        return PyObject_CallMethodObjArgs(frames, take_out, region, NULL);
    Py_INCREF(frame);
    if (PyList_SetSlice(frames, last, last + 1, NULL) < 0)
        Py_CLEAR(frame);
    return frame;
}

static PyObject *leave_region(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "leave() takes 3 arguments, got %zd", count);
    if (!PyLong_CheckExact(args[2]))
        return PyObject_CallFunctionObjArgs(leave_in_python, args[0], args[1], args[2], NULL);
    int8_t device = DEVICE(PyLong_AsLong(args[2]));
    PyObject *frame = pop_frame(args[0], args[1]);
    if (frame == NULL)
        return NULL;
    long before = PyLong_AsLong(PyTuple_GetItem(frame, 1));
    long nesting = PyLong_AsLong(PyTuple_GetItem(frame, 2));
    bool superseded = PyTuple_GetItem(frame, 3) == Py_True;
    Py_DECREF(frame);
    int depth = leave_nesting();
    while (depth >= nesting)
        depth = leave_nesting();
    if (!superseded)
        change(device, state_of(device), before);
    if (depth == 0)
        drop_casts();
    return PyBool_FromLong(modes_are_on());
}

static PyObject *read_state(PyObject *module, PyObject *device)
{
    (void)module;
    long number = PyLong_AsLong(device);
    return number == -1 && PyErr_Occurred() ? NULL : PyLong_FromLong(state_of((int8_t)number));
}

static PyObject *bind_torch(PyObject *module, PyObject *args)
{
    const char *path;
    (void)module;
    if (!PyArg_ParseTuple(args, "sOO", &path, &enter_in_python, &leave_in_python))
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL)
        return PyErr_Format(PyExc_ImportError, "torch has not loaded %s", path);
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        *symbols[i].target = dlsym(library, symbols[i].name);
        if (*symbols[i].target == NULL)
            return PyErr_Format(PyExc_ImportError, "this torch has no %s", symbols[i].name);
    }
    Py_INCREF(enter_in_python);
    Py_INCREF(leave_in_python);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"bind", bind_torch, METH_VARARGS, "Look up torch's functions in the library at a path; before all else."},
    {"read", read_state, METH_O, "Return the state of the device with that number."},
    {"enter", (PyCFunction)(void (*)(void))enter_region, METH_FASTCALL, "See amp_core/region_state.py."},
    {"leave", (PyCFunction)(void (*)(void))leave_region, METH_FASTCALL, "See amp_core/region_state.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_region_state", "Compiled form of amp_core.regions.torch_state.", -1, methods, 0, 0, 0, 0,
};

PyMODINIT_FUNC PyInit__region_state(void)
{
    take_out = PyUnicode_InternFromString("take_out");
    return take_out == NULL ? NULL : PyModule_Create(&definition);
}
