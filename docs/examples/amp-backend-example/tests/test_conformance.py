from amp_core.testing import BackendConformance


class TestNpy(BackendConformance):
    device_type = "npy"
