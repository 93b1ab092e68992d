# `make` alone lists the targets. Every target sets up .venv first; the second time that is instant.

PYTHON ?=# the interpreter that a new .venv is made with; empty: the first one found that will do
TORCH_INDEX ?=# a package index to install torch from; empty: the one that pip is set to
EXTRAS := plot,transformers,lab,test,oracles

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each test process and each notebook would compile memlab again.
unexport PYTHONDONTWRITEBYTECODE
# Predictions follow them; the notebooks' stored outputs have torch's defaults.
unexport PYTORCH_ALLOC_CONF
unexport PYTORCH_CUDA_ALLOC_CONF

VENV_PYTHON := .venv/bin/python
BENCHMARKS := $(wildcard benchmarks/[a-z]*.py)
LESSONS := $(wildcard lessons/*.ipynb)
SOLUTIONS := $(wildcard solutions/*.ipynb)
ONE_LESSON := $(wildcard lessons/day10_*.ipynb) # among the quickest to run with its stubs

# torch's threads spin while they wait, which on a shared machine is most of the time. What is timed
# runs as users run it: there chunks would take 2 to 3 times as long with sleeping threads.
SLEEPING := OMP_WAIT_POLICY=PASSIVE PYTHONHASHSEED=0
RUN_TESTS := $(SLEEPING) $(VENV_PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -p no:nbval

# Two files at a time, each as memlab.course.build ran it: no result hangs on the number of threads,
# and pictures show inside the page.
RUN_NOTEBOOKS := env -u MPLBACKEND OMP_NUM_THREADS=1 $(SLEEPING) $$cpu \
  $(VENV_PYTHON) -m pytest -q -n 2 --dist loadfile

# What a CPU can do decides which kernels torch, oneDNN and MKL take, and with them the last bits.
# Each of these is an older CPU, or one with two threads, as a newer one can play it. MKL takes the
# kernels of COMPATIBLE or AVX2 on an AMD CPU too.
CPUS := ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41,MKL_CBWR=COMPATIBLE \
  ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_CBWR=AVX2 \
  ATEN_CPU_CAPABILITY=avx512,ONEDNN_MAX_CPU_ISA=AVX512_CORE,MKL_CBWR=AVX512 \
  OMP_NUM_THREADS=2,TEST_THREADS=2

# Every test that compares floats, and the checks of the course, which compare a learner's.
FLOAT_TESTS = tests/course/test_checks.py \
  $(shell grep -rlE 'assert_close|is_close|torch\.equal|\.abs\(\)' tests --include='test_*.py')

# A stamp is written when its installation is complete. Its name holds what it is good for: a folder
# that was copied elsewhere, or another index for torch, is set up again.
label := $(shell printf '%s' '$(CURDIR) $(TORCH_INDEX)' | cksum | cut -d ' ' -f 1)
torch_stamp := .venv/.torch-$(label)
stamp := .venv/.installed-$(label)
site_stamp := .venv/.site-$(label)
evidence_stamp := .venv/.evidence-$(label)
old_torch_stamp := .venv/.evidence-torch-$(label)
old_torch := benchmarks/evidence/packages/torch.txt# large: tests do without
evidence_packages := $(filter-out $(old_torch),$(wildcard benchmarks/evidence/packages/*.txt))

.DEFAULT_GOAL := help
.PHONY: help measure check test static slow evidence bench solutions lessons floats cpus lab site lessons-exist benchmarks-exist

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /\1 /p' $(MAKEFILE_LIST) | \
	  while read -r target does; do printf '  make %-11s%s\n' "$$target" "$$does"; done
	@echo
	@echo '  PYTHON=python3.12  the interpreter to make .venv with'
	@echo '  TORCH_INDEX=<url>  the index to install torch from, for another build of it'

measure: $(stamp) ## measure every technique on this machine
	@.venv/bin/memlab measure

check: static ## before each commit: format, lint, types, quick tests, one lesson
	@$(RUN_TESTS) -q -m 'not slow' @tests/check.txt
	@$(RUN_NOTEBOOKS) --nbval-lax $(ONE_LESSON)

test: static $(evidence_stamp) ## the same, with all tests and every notebook
	@$(RUN_TESTS) -m 'not slow'
	@$(MAKE) --no-print-directory solutions
	@$(RUN_NOTEBOOKS) --nbval-lax $(ONE_LESSON)

static: $(stamp)
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m mypy

slow: $(stamp) $(evidence_stamp) ## every test, with every parameter: about an hour
	@$(RUN_TESTS)

evidence: $(stamp) $(evidence_stamp) $(old_torch_stamp) ## predict every step that others measured on a GPU: docs/EVIDENCE.md
	@$(VENV_PYTHON) benchmarks/evidence.py

bench: benchmarks-exist $(stamp) $(evidence_stamp) ## every number of the README, as Markdown
	@set -e; for script in $(BENCHMARKS); do $(VENV_PYTHON) "$$script"; done

# The outputs were stored without a GPU's results, or with fewer; here a made-up GPU has some. A cell
# that shows them must say so, or it fails. (`make cpus` runs the same cells without.)
solutions: lessons-exist $(stamp) ## run every solution in Jupyter: outputs must come out as stored
	@$(VENV_PYTHON) -m memlab.course.build --check
	@MEMLAB_RESULTS='$(CURDIR)/tests/course/made_up_gpu' $(RUN_NOTEBOOKS) --nbval $(SOLUTIONS)

lessons: solutions ## the same, and every lesson with its stubs, of which make test runs one
	@$(RUN_NOTEBOOKS) --nbval-lax $(LESSONS)

cpus: lessons-exist $(stamp) ## every solution as other CPUs would run it: half an hour
	@failed=; for name in $(CPUS); do \
	  echo "== $$name"; cpu=$$(echo "$$name" | tr , ' '); \
	  $(RUN_NOTEBOOKS) --nbval $(SOLUTIONS) || failed="$$failed $$name"; \
	done; \
	[ -z "$$failed" ] || { echo "Outputs differ with:$$failed" >&2; exit 1; }

floats: $(stamp) ## every test that compares floats, as other CPUs would run it: an hour
	@failed=; for name in $(CPUS); do \
	  echo "== $$name"; \
	  env $$(echo "$$name" | tr , ' ') $(RUN_TESTS) -q -m 'not slow' $(FLOAT_TESTS) \
	    || failed="$$failed $$name"; \
	done; \
	[ -z "$$failed" ] || { echo "Tests fail with:$$failed" >&2; exit 1; }

site: $(site_stamp) ## build the documentation site into site/public, and check it; needs npm and Chromium
	@$(VENV_PYTHON) site/build.py
	@$(VENV_PYTHON) site/check_planner.py

lab: lessons-exist $(stamp) ## open lesson 1 in JupyterLab
	@.venv/bin/memlab start 1

lessons-exist:
	@test -n '$(LESSONS)' || { echo 'There are no lessons here yet: lessons/ is empty.' >&2; exit 2; }

benchmarks-exist:
	@test -n '$(BENCHMARKS)' || { echo 'There are no scripts in benchmarks/.' >&2; exit 2; }

# Set-up, in two steps: torch alone, from the index asked for, so that the second step finds it
# there and cannot replace it with another build. Such an index holds few versions of what torch
# needs: there only torch is pinned, and the second step brings the rest to its versions.

good_enough := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
candidates := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
torch_pin := $(shell grep '^torch==' constraints.txt)
torch_from_index := --force-reinstall --index-url '$(TORCH_INDEX)' $(torch_pin)
torch_as_pip_is_set := torch -c constraints.txt

$(torch_stamp): constraints.txt
	@$(VENV_PYTHON) -c '$(good_enough)' 2>/dev/null || { \
	  found=; \
	  for python in $(candidates); do \
	    if "$$python" -c '$(good_enough)' 2>/dev/null; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'memlab needs Python 3.11 or newer with its venv module; tried: $(candidates).' \
	      'Name one: make PYTHON=/path/to/python3.11' >&2; \
	    exit 2; \
	  fi; \
	  echo "making .venv with $$("$$found" --version)"; \
	  "$$found" -m venv --clear .venv; \
	}
# Another index is about to replace the build that older stamps stand for.
	@$(if $(TORCH_INDEX),rm -f .venv/.torch-*)
	@echo 'installing torch into .venv: under a minute for a CPU build, minutes for a GPU build (GBs)'
	@$(VENV_PYTHON) -m pip install -qq $(if $(TORCH_INDEX),$(torch_from_index),$(torch_as_pip_is_set))
	@touch $@

$(stamp): $(torch_stamp) pyproject.toml constraints.txt
	@echo 'installing memlab and the rest into .venv: about half a minute'
	@$(VENV_PYTHON) -m pip install -qq -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@

$(site_stamp): $(stamp)
	@$(VENV_PYTHON) -m pip install -qq -e '.[site]' -c constraints.txt
	@touch $@

# Steps that others measured are predicted with the package versions that were measured. Each list
# has a folder of its own, so that nothing else imports from it.
$(evidence_stamp): $(torch_stamp) $(evidence_packages)
	@for list in $(evidence_packages); do \
	  $(VENV_PYTHON) -m pip install -qq --no-deps --upgrade -r $$list \
	    --target .venv/evidence/$$(basename $$list .txt) || exit 1; \
	done
	@touch $@

# pip's own index has the build for CUDA, which needs its libraries: gigabytes.
$(old_torch_stamp): $(torch_stamp) $(old_torch)
	@$(VENV_PYTHON) -m pip install -qq --upgrade -r $(old_torch) --target .venv/evidence/torch \
	  $(if $(TORCH_INDEX),--no-deps --index-url '$(TORCH_INDEX)')
	@touch $@
