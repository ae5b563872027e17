"""Build and installation; inside a ROS workspace colcon calls this (ament_python)."""

import sys
from glob import glob
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.develop import develop

NAME = 'qwen_vl_ros'
SHARE = f'share/{NAME}'

#: Folders of the source tree that are installed beside the package, under ``share/qwen_vl_ros``.
SHARED = ('config', 'launch', 'models/tiny')

HERE = Path(__file__).resolve().parent


def build_kernels(output):
    """Build the native kernels; where that fails, say why in one line and go on without them."""
    sys.path.insert(0, str(HERE / 'kernels'))
    try:
        from build import BuildError, build
    except ImportError:
        print('kernels: left out, their sources are not here')
        return
    finally:
        sys.path.pop(0)
    try:
        lines = build(output, HERE / 'build' / 'kernels')
    except BuildError as error:
        lines = [f'kernels: left out: {error}']
    print('\n'.join(lines))


class BuildPackage(build_py):
    """Python files, and the kernels beside them."""

    def run(self):
        """Build."""
        super().run()
        base = HERE if getattr(self, 'editable_mode', False) else Path(self.build_lib).resolve()
        build_kernels(base / NAME / 'kernels' / 'lib')


class Develop(develop):
    """A link to the source tree (``colcon build --symlink-install``), with the kernels in it."""

    def run(self):
        """Link."""
        super().run()
        if not self.uninstall:
            build_kernels(HERE / NAME / 'kernels' / 'lib')


class Native(Distribution):
    """Machine code inside: a wheel of it is for one platform."""

    def has_ext_modules(self):
        """Say so."""
        return True


setup(
    name=NAME,
    cmdclass={'build_py': BuildPackage, 'develop': Develop},
    distclass=Native,
    version='0.1.0',
    packages=find_packages(include=[NAME, f'{NAME}.*']),
    package_data={'': ['py.typed', '*.json', '*.so', 'data/*.png']},
    data_files=[
        ('share/ament_index/resource_index/packages', [f'resource/{NAME}']),
        (SHARE, ['package.xml']),
        *((f'{SHARE}/{folder}', [path for path in glob(f'{folder}/*') if '.' in path])
          for folder in SHARED),
    ],
    python_requires='>=3.10',
    zip_safe=False,
    maintainer='qwen_vl_ros maintainers',
    maintainer_email='maintainers@qwen-vl-ros.dev',
    description='Qwen2-VL answers questions about camera topics of ROS 2',
    license='Apache-2.0',
    entry_points={
        'console_scripts': [
            'qwen_vl = qwen_vl_ros.cli.main:main',
            'qwen_vl_node = qwen_vl_ros.node.entry:main',
        ],
    },
)
