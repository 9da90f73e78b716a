"""Servers on 127.0.0.1 for the real clients: one of plain files, and one that speaks the Hub's protocol."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@contextmanager
def serve(handler, **state):
    server = ThreadingHTTPServer(('127.0.0.1', 0), handler)
    server.requests = []
    for key, value in state.items():
        setattr(server, key, value)
    server.address = f'http://127.0.0.1:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def reply(self, body=b'', status=200, cut=None, **headers):
        """Send a body, or its first `cut` bytes before the connection breaks."""
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        for key, value in headers.items():
            self.send_header(key.replace('_', '-'), value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body[:cut])
        self.close_connection = self.close_connection or cut is not None


class FileHandler(Handler):
    """Serves `server.content` at every address. Its faults, one per request: statuses, or byte counts to cut after."""

    def do_GET(self):
        server = self.server
        start = int(self.headers['Range'].removeprefix('bytes=').rstrip('-')) if 'Range' in self.headers else 0
        server.requests.append((self.path, start))
        fault = server.faults.pop(0) if server.faults else None
        if isinstance(fault, str):
            self.reply(b'no', status=int(fault))
            return
        ranged = start and server.ranges
        self.reply(server.content[start:] if ranged else server.content, 206 if ranged else 200, cut=fault)


def file_server(content, faults=(), ranges=True):
    return serve(FileHandler, content=content, faults=list(faults), ranges=ranges)


KINDS = 'create', 'preupload', 'commit', 'batch', 'lfs', 'resolve'


class HubHandler(Handler):
    """As much of the Hub as models need: repositories, commits with regular and LFS files, and downloads.

    `server.repositories` maps names to a list of commits, each a dict of path to content; the last one is main.
    """

    def body(self):
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))

    def fails(self):
        fault = self.server.faults.get((self.command, self.kind()))
        if not fault:
            return False
        status = fault.pop(0)
        if status == 'break':
            self.close_connection = True
            self.connection.close()
        else:
            self.reply(b'{}', status=status)
        return True

    def kind(self):
        parts = self.path.split('?')[0].split('/')
        return next((kind for kind in KINDS if kind in parts), '')

    def json(self, value, status=200, **headers):
        self.reply(json.dumps(value).encode(), status, Content_Type='application/json', **headers)

    def handle_request(self):
        self.server.requests.append((self.command, self.path))
        body = self.body()
        if self.fails():
            return
        path = urlsplit(self.path).path
        if self.command == 'POST' and self.headers.get('Authorization') != 'Bearer hf_right':
            self.json({'error': 'Invalid credentials'}, 401)
            return
        getattr(self, f'do_{self.kind() or "info"}')(path, body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def do_create(self, path, body):
        request = json.loads(body)
        name = f'{request["organization"] or "me"}/{request["name"]}'
        if name in self.server.repositories:
            self.json({'error': 'exists', 'url': f'{self.server.address}/{name}'}, 409)
            return
        self.server.repositories[name] = []
        self.server.private[name] = request.get('visibility') == 'private'
        self.json({'url': f'{self.server.address}/{name}'})

    def do_info(self, path, body):
        if path == '/api/validate-yaml':
            self.json({'errors': [], 'warnings': []})
            return
        name = path.removeprefix('/api/models/')
        if name not in self.server.repositories:
            self.not_found('RepoNotFound')
            return
        self.json({'id': name, 'modelId': name, 'private': self.server.private[name], 'sha': self.sha(name, -1)})

    def do_preupload(self, path, body):
        files = json.loads(body)['files']
        self.json(
            {
                'files': [
                    {
                        'path': file['path'],
                        'shouldIgnore': False,
                        'uploadMode': 'lfs' if file['path'].endswith('.safetensors') else 'regular',
                    }
                    for file in files
                ]
            }
        )

    def do_batch(self, path, body):
        objects = []
        for item in json.loads(body)['objects']:
            upload = {'upload': {'href': f'{self.server.address}/lfs/{item["oid"]}'}}
            objects.append({**item, **({} if item['oid'] in self.server.blobs else {'actions': upload})})
        self.json({'objects': objects, 'transfer': 'basic'})

    def do_lfs(self, path, body):
        assert hashlib.sha256(body).hexdigest() == path.rpartition('/')[2]
        self.server.blobs[path.rpartition('/')[2]] = body
        self.reply()

    def do_commit(self, path, body):
        name = path.removeprefix('/api/models/').partition('/commit/')[0]
        commits = self.server.repositories[name]
        files = dict(commits[-1]) if commits else {}
        for line in body.splitlines():
            item = json.loads(line)
            value = item['value']
            if item['key'] == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif item['key'] == 'lfsFile':
                files[value['path']] = self.server.blobs[value['oid']]
        commits.append(files)
        sha = self.sha(name, -1)
        self.json({'commitUrl': f'{self.server.address}/{name}/commit/{sha}', 'commitOid': sha})

    def sha(self, name, index):
        commits = self.server.repositories[name]
        return hashlib.sha1(f'{name} {index % len(commits)}'.encode()).hexdigest() if commits else None

    def not_found(self, code):
        self.reply(b'{}', 404, X_Error_Code=code)

    def do_resolve(self, path, body):
        name, _, rest = path[1:].partition('/resolve/')
        revision, _, file = unquote(rest).partition('/')
        commits = self.server.repositories.get(name)
        if commits is None or self.server.private[name] and self.headers.get('Authorization') != 'Bearer hf_right':
            self.not_found('RepoNotFound')
            return
        revisions = {self.sha(name, i): i for i in range(len(commits))} | {'main': len(commits) - 1}
        if revision not in revisions:
            self.not_found('RevisionNotFound')
            return
        index = revisions[revision]
        if index < 0 or file not in commits[index]:
            self.not_found('EntryNotFound')
            return
        content = commits[index][file]
        self.reply(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=self.sha(name, index))


def hub_server():
    """A Hub where 'hf_right' is the one good token. Its faults: lists of statuses, or 'break', by method and kind."""
    return serve(HubHandler, repositories={}, private={}, blobs={}, faults={})
