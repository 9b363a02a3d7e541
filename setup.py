"""With kernels in model/native/prebuilt, where `.ci/wheel` compiles them, the wheel is for this platform and any Python 3."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

KERNELS = list(Path(__file__).parent.glob("model/native/prebuilt/*.so"))


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(KERNELS)


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=WithKernels, cmdclass={"bdist_wheel": AnyPython})
