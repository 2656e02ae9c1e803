"""Build step: recipes and launch configs, which lie at the top of the repository, become a part of the package."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("recipes", "accelerate_configs")


def shipped() -> list[str]:
    """List the files that ship, as paths from the top of the repository."""
    return sorted(file.as_posix() for folder in SHIPPED for file in Path(folder).glob("*.yaml"))


class BuildPackage(build_py):
    """Copies what ships beside the modules; an editable install finds it where it lies."""

    def run(self) -> None:
        """Fill the folder of which the wheel is made."""
        super().run()
        for file in () if self.editable_mode else shipped():
            built = Path(self.build_lib, "trainkit", file)
            self.mkpath(str(built.parent))
            self.copy_file(file, str(built))

    def get_source_files(self) -> list[str]:
        """List the files of a source distribution."""
        return [*super().get_source_files(), *shipped()]


setup(cmdclass={"build_py": BuildPackage})
