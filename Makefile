# Two commands: `make demo` and `make test`. Both make what they need first, once.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv kernels demo test lint clean bench

VENV ?= .venv
ROS := $(if $(ROS_DISTRO),$(wildcard /opt/ros/$(ROS_DISTRO)))
ROOT := $(CURDIR)
PY := $(VENV)/bin/python

# What a process needs to find the interfaces and to get whole pictures over DDS (see config/fastdds.xml).
export AMENT_PREFIX_PATH := $(abspath $(VENV))$(if $(ROS),:$(AMENT_PREFIX_PATH))
export FASTRTPS_DEFAULT_PROFILES_FILE ?= $(ROOT)/config/fastdds.xml
export FASTDDS_DEFAULT_PROFILES_FILE ?= $(FASTRTPS_DEFAULT_PROFILES_FILE)
export LD_LIBRARY_PATH := $(abspath $(VENV))/lib$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

# Threads that spin while they wait make torch ten times slower where cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE

INSTALLED := $(VENV)/.installed
MESSAGES := $(VENV)/.messages
KERNELS := build/.kernels

help:
	@echo 'make demo   answer questions about the demo bag; report in build/demo'
	@echo 'make test   run the tests'
	@echo 'make bench  time every stage that this machine can; tables in benchmarks/README.md'
	@echo 'make lint   ruff and mypy'
	@echo 'make kernels  build the native kernels: CPU, and CUDA where nvcc is'
	@echo 'make venv   only make the environment ($(VENV)), with the interfaces built'
	@echo 'make clean  remove what was built (not $(VENV))'

venv: $(MESSAGES)

$(INSTALLED): setup.py tools/setup_venv $(wildcard requirements*.txt)
	@tools/setup_venv $(VENV) $(ROS)
	@touch $@

# A merged install into the environment: nothing has to be sourced afterwards.
$(MESSAGES): $(INSTALLED) $(shell find qwen_vl_msgs -type f)
	@echo 'setup: building qwen_vl_msgs'
	@mkdir -p build
	@site=$$($(PY) -c 'import sys; print("lib/python%d.%d/site-packages" % sys.version_info[:2])') && \
	  CMAKE_PREFIX_PATH=$(AMENT_PREFIX_PATH) PATH=$(abspath $(VENV))/bin:$$PATH \
	  colcon --log-base build/log build --event-handlers console_direct- summary- \
	    --merge-install --base-paths qwen_vl_msgs --build-base build/msgs --install-base $(VENV) \
	    --cmake-clean-cache --cmake-args -DPython3_EXECUTABLE=$(abspath $(PY)) -DBUILD_TESTING=OFF \
	    -DPYTHON_INSTALL_DIR=$$site > build/msgs.log 2>&1 || { tail -40 build/msgs.log; exit 1; }
	@touch $@

kernels: $(KERNELS)

$(KERNELS): $(INSTALLED) $(shell find kernels -type f -not -name '*.md')
	@$(PY) kernels/build.py
	@touch $@

demo: $(MESSAGES) $(KERNELS)
	@$(PY) tools/demo.py --output build/demo

test: $(MESSAGES) $(KERNELS)
	@$(PY) -m pytest

bench: $(MESSAGES) $(KERNELS)
	@$(PY) -m qwen_vl_ros.cli.main bench

lint: $(MESSAGES)
	@$(PY) -m ruff check .
	@$(PY) -m mypy

clean:
	rm -rf build install log qwen_vl_ros/kernels/lib
