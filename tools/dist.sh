#!/bin/sh
# Builds wheel and sdist into dist/, checks them, and writes there the bill of materials of an installation of the wheel
# (CycloneDX, JSON). Its tools are in an environment of their own, .dist-tools; they and the dependencies come from PyPI.
# usage: tools/dist.sh PYTHON [EXTRAS]      EXTRAS such as [torch]: what the bill counts beside a login node's packages
set -eu
python=$1
extras=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
tools=.dist-tools/bin/python
pip() { # pip PYTHON WORD...
    with=$1
    shift
    "$with" -m pip --disable-pip-version-check -q install "$@"
}

if [ ! -x "$tools" ]; then
    "$python" -m venv .dist-tools
    pip "$tools" build twine cyclonedx-bom jsonschema pyyaml
    pip "$tools" --no-deps cffconvert # for the schema of CITATION.cff; what else it brings pins old packages
fi
rm -rf dist
"$tools" -m build --outdir dist . >dist.log 2>&1 || { cat dist.log >&2; exit 1; }
rm dist.log
"$tools" -m twine check --strict dist/*
"$tools" - <<'CODE'
import datetime, importlib.util, json, pathlib
import jsonschema, yaml

folder = pathlib.Path(importlib.util.find_spec("cffconvert").submodule_search_locations[0])
schema = json.loads(next(folder.glob("schemas/1.2.0/schema.json")).read_text())
given = yaml.load(pathlib.Path("CITATION.cff").read_text(), yaml.BaseLoader)
jsonschema.validate(given, schema, format_checker=jsonschema.FormatChecker())
print("CITATION.cff: PASSED (schema 1.2.0)")
CODE
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder"
wheel=$(ls dist/*.whl)
pip "$folder/bin/python" "$wheel$extras"
"$folder/bin/python" -m pip check
"$folder/bin/python" -m pip --disable-pip-version-check -q uninstall -y pip setuptools
bill=dist/$(basename "$wheel" | cut -d- -f1-2).cdx.json
"$tools" -m cyclonedx_py environment --output-reproducible --of JSON -o "$bill" "$folder/bin/python"
echo "$bill: $("$tools" -c "import json, sys; print(len(json.load(open(sys.argv[1]))['components']))" "$bill") components"
ls -l dist
