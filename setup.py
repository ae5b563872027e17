"""Build and installation; inside a ROS workspace colcon calls this (ament_python)."""

from glob import glob

from setuptools import find_packages, setup

NAME = 'qwen_vl_ros'
SHARE = f'share/{NAME}'

#: Folders of the source tree that are installed beside the package, under ``share/qwen_vl_ros``.
SHARED = ('config', 'launch', 'models/tiny')

setup(
    name=NAME,
    version='0.1.0',
    packages=find_packages(include=[NAME, f'{NAME}.*']),
    package_data={'': ['py.typed', '*.json', '*.so']},
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
            'qwen_vl_node = qwen_vl_ros.node.main:main',
        ],
    },
)
