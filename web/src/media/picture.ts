// Pictures before they are sent: large ones are scaled down.
import { labels } from "../text";

const MAX_SIDE = 4096; // pixels
const JPEG_QUALITY = 0.92;

/**
 * Return a picture with at most `maxBytes` and sides of at most 4096 pixels: the same blob if it has those. Throws an
 * Error if the picture is damaged.
 */
export async function fitPicture(blob: Blob, maxBytes: number): Promise<Blob> {
  const url = URL.createObjectURL(blob);
  try {
    const image = await load(url);
    const side = Math.max(image.naturalWidth, image.naturalHeight);
    if (side <= MAX_SIDE && blob.size <= maxBytes) return blob;
    for (let scale = Math.min(1, MAX_SIDE / side); ; scale *= 0.75) {
      // Lossless pictures stay lossless unless that is too large.
      const types = blob.type === "image/jpeg" ? ["image/jpeg"] : ["image/png", "image/jpeg"];
      for (const type of types) {
        const drawn = await draw(image, scale, type);
        if (drawn.size <= maxBytes) return drawn;
      }
    }
  } finally {
    URL.revokeObjectURL(url);
  }
}

function load(url: string): Promise<HTMLImageElement> {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => reject(new Error(labels.value.media.damaged));
    image.src = url;
  });
}

function draw(image: HTMLImageElement, scale: number, type: string): Promise<Blob> {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.naturalWidth * scale));
  canvas.height = Math.max(1, Math.round(image.naturalHeight * scale));
  const context = canvas.getContext("2d")!;
  if (type === "image/jpeg") {
    context.fillStyle = "#fff"; // behind transparent pixels
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) => {
    canvas.toBlob((drawn) => (drawn ? resolve(drawn) : reject(new Error(labels.value.media.tooLargeToDraw))), type, JPEG_QUALITY);
  });
}
