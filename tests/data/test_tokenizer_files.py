import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import chat_templates as templates
import pytest

from meshwright.data.chat import make_template
from meshwright.data.tokenizer import load_tokenizer, open_tokenizer
from meshwright.errors import UserError

TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return templates.write_byte_level(tmp_path_factory.mktemp("tokenizer"), templates.QWEN)


@pytest.fixture
def hub(folder, tmp_path):
    """The address of a hub with two models, one of which is just a tokenizer.json."""
    files = {f"/some/model/resolve/main/{path.name}": path.read_bytes() for path in folder.iterdir()}
    files["/bare/model/resolve/main/tokenizer.json"] = (folder / "tokenizer.json").read_bytes()

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            name = "RepoNotFound" if self.path.startswith("/no/") else "EntryNotFound"
            headers = {"X-Error-Code": name} if data is None else {"ETag": f'"{hash(self.path)}"'}
            for key, value in {**headers, "X-Repo-Commit": "a" * 40, "Content-Length": len(data or b"")}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        do_HEAD = do_GET

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("where", ["jinja file", "config", "several"])
def test_a_chat_template_is_kept_wherever_it_was(folder, tmp_path, where):
    moved, one = tmp_path / "moved", open_tokenizer(f"hf:{folder}")
    shutil.copytree(folder, moved)
    assert (moved / "chat_template.jinja").read_text() == templates.QWEN
    if where != "jinja file":
        (moved / "chat_template.jinja").unlink()
        config = json.loads((moved / "tokenizer_config.json").read_text())
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": templates.QWEN}]
        config["chat_template"] = named if where == "several" else templates.QWEN
        (moved / "tokenizer_config.json").write_text(json.dumps(config))
    open_tokenizer(f"hf:{moved}").save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.chat_template == templates.QWEN
    assert again.fingerprint == one.fingerprint
    assert make_template("tokenizer", again).encode(TALK) == make_template("tokenizer", one).encode(TALK)


def test_a_chat_template_that_is_not_utf8_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "moved")
    (tmp_path / "moved" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template.jinja: not UTF-8"):
        open_tokenizer(f"hf:{tmp_path / 'moved'}")


def test_the_hub_gives_the_config_and_the_chat_template_too(folder, hub, tmp_path):
    code = """
import sys
from meshwright.data.tokenizer import open_tokenizer
from meshwright.errors import UserError
one, other = open_tokenizer("hf:some/model"), open_tokenizer("hf:bare/model")
print(one.fingerprint, len(one.chat_template), one.end_of_text, len(other.chat_template), other.end_of_text)
try:
    open_tokenizer("hf:no/model")
except UserError as error:
    print(error)
"""
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    known, refused = done.stdout.splitlines()
    local = open_tokenizer(f"hf:{folder}")
    end = local.special_tokens["<|endoftext|>"]
    assert known.split() == [local.fingerprint, *map(str, (len(templates.QWEN), local.end_of_text, 0, end))]
    assert local.end_of_text == local.special_tokens["</s>"] != end
    assert refused.startswith("tokenizer.kind = 'hf:no/model': no such folder, and the hub has none of that name")
